// What is asked of the CUDA driver itself (kernels/cuda/library.cpp), under its
// own names.
#include <c10/macros/Export.h>

#include <mutex>
#include <utility>

#include "devices.h"
#include "graph.h"

extern "C" {

C10_EXPORT int cuStreamIsCapturing(void* stream, int* status) {
  using namespace torchkv::mock_cuda; // NOLINT(google-build-using-namespace)
  const std::lock_guard lock(mutex());
  *status = capture_of(stream_of(stream)) != nullptr ? 1 : 0;
  return 0;
}

C10_EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  *mode = std::exchange(torchkv::mock_cuda::capture_mode(), *mode);
  return 0;
}

} // extern "C"

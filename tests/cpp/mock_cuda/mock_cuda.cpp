#include "mock_cuda.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <string>

#include "device/runtime.h"
#include "graph.h"
#include "host_memory.h"

namespace torchkv::mock_cuda {

void reset(int num_devices, Topology topology) {
  const std::lock_guard lock(mutex());
  check();
  TORCH_CHECK(
      num_live_blocks() == 0,
      "mock_cuda: unexpected device memory in use: ",
      num_live_blocks(),
      " blocks");
  forget_host_memory();
  forget_blocks();
  reset_devices(num_devices, topology);
  forget_peers();
}

void launch(
    const char* kernel,
    void* native_stream,
    c10::ArrayRef<Range> ranges,
    const std::function<void()>& run) {
  const std::lock_guard lock(mutex());
  const c10::Stream stream = stream_of(native_stream);
  TORCH_CHECK(
      stream.device() == current_device(),
      "mock_cuda: ",
      kernel,
      " was launched on ",
      place_of(stream),
      " while the current device is ",
      current_device());
  ++counters().launches;
  carry_out(
      stream,
      [name = std::string(kernel), touched = ranges.vec(), run](
          c10::Stream on) {
        const WorkPtr work = enqueue(on, name);
        for (const auto& range : touched) {
          access(work, on, range.begin, range.num_bytes, range.is_write);
        }
        run();
      });
}

} // namespace torchkv::mock_cuda

#include <cuda_runtime.h>

#include "body.h"
#include "launch.h"

namespace torchkv::kernels::cuda {
namespace {

int launch_sum(
    Variant variant,
    const void* params,
    size_t params_bytes,
    uint32_t num_blocks,
    void* stream) {
  const auto launch = [&](auto function) {
    return function(variant, params, params_bytes, num_blocks, stream);
  };
  switch (variant.value) {
    case Dtype::kFloat:
      return launch(cuda::launch_sum<float>);
    case Dtype::kHalf:
      return launch(cuda::launch_sum<Half>);
    case Dtype::kBFloat16:
      return launch(cuda::launch_sum<BFloat16>);
    case Dtype::kDouble:
      return launch(cuda::launch_sum<double>);
    case Dtype::kBool:
      return launch(cuda::launch_sum<Bool>);
    case Dtype::kInt8:
      return launch(cuda::launch_sum<uint8_t>);
    case Dtype::kInt16:
      return launch(cuda::launch_sum<uint16_t>);
    case Dtype::kInt32:
      return launch(cuda::launch_sum<uint32_t>);
    case Dtype::kInt64:
      return launch(cuda::launch_sum<uint64_t>);
  }
  return cudaErrorInvalidValue;
}

int num_multiprocessors(int device, int* result) {
  return cudaDeviceGetAttribute(result, cudaDevAttrMultiProcessorCount, device);
}

int is_capturing(void* stream, bool* result) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const auto error =
      cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  *result = status != cudaStreamCaptureStatusNone;
  return error;
}

int enable_peer(int device, int peer) {
  int before = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (error != cudaSuccess) {
    return error;
  }
  error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      error = cudaSuccess;
    }
  }
  // An error that is handled must not look like one of the next launch.
  cudaGetLastError();
  const cudaError_t restored = cudaSetDevice(before);
  return error == cudaSuccess ? restored : error;
}

const char* error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

Table make_table() {
  int driver = 0;
  // Without a driver nobody launches anything.
  const bool has_driver = cudaDriverGetVersion(&driver) == cudaSuccess;
  cudaGetLastError();
  return {
      kAbi,
      has_driver && driver >= 12010 ? static_cast<uint32_t>(kLargeParams)
                                    : static_cast<uint32_t>(kSmallParams),
      &launch_sum,
      &launch_copy,
      &num_multiprocessors,
      &is_capturing,
      &enable_peer,
      &error_string};
}

} // namespace
} // namespace torchkv::kernels::cuda

const torchkv::kernels::cuda::Table* torchkv_cuda_table() {
  static const auto table = torchkv::kernels::cuda::make_table();
  return &table;
}

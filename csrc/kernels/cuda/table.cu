#include <cuda_runtime.h>

#include "launch.h"
#include "types.h"

namespace torchkv::kernels::cuda {
namespace {

int launch_sum(
    Variant variant,
    const void* params,
    size_t params_bytes,
    void* stream) {
  const auto launch = [&](auto function) {
    return function(variant, params, params_bytes, stream);
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
  return returned(
      cudaDeviceGetAttribute(result, cudaDevAttrMultiProcessorCount, device));
}

int is_capturing(void* stream, bool* result) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const auto error =
      cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  *result = status != cudaStreamCaptureStatusNone;
  return returned(error);
}

int enable_peer(int device, int peer) {
  int before = 0;
  int error = returned(cudaGetDevice(&before));
  if (error != cudaSuccess) {
    return error;
  }
  error = returned(cudaSetDevice(device));
  if (error == cudaSuccess) {
    error = returned(cudaDeviceEnablePeerAccess(peer, 0));
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      error = cudaSuccess;
    }
  }
  const int restored = returned(cudaSetDevice(before));
  return error == cudaSuccess ? restored : error;
}

const char* error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

Table make_table() {
  int driver = 0;
  const bool has_driver =
      returned(cudaDriverGetVersion(&driver)) == cudaSuccess;
  return {
      kAbi,
      has_driver && driver >= 12010 ? static_cast<uint32_t>(kLargeParams)
                                    : static_cast<uint32_t>(kSmallParams),
      &launch_sum,
      &launch_copy,
      &num_multiprocessors,
      &has_code,
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

#include <cuda_runtime.h>

#include "launch.h"
#include "types.h"

namespace torchkv::kernels::cuda {
namespace {

int launch_sum(Variant variant, Launch launch) {
  switch (variant.value) {
    case Dtype::kFloat:
      return cuda::launch_sum<float>(variant, launch);
    case Dtype::kHalf:
      return cuda::launch_sum<Half>(variant, launch);
    case Dtype::kBFloat16:
      return cuda::launch_sum<BFloat16>(variant, launch);
    case Dtype::kDouble:
      return cuda::launch_sum<double>(variant, launch);
    case Dtype::kBool:
      return cuda::launch_sum<Bool>(variant, launch);
    case Dtype::kInt8:
      return cuda::launch_sum<uint8_t>(variant, launch);
    case Dtype::kInt16:
      return cuda::launch_sum<uint16_t>(variant, launch);
    case Dtype::kInt32:
      return cuda::launch_sum<uint32_t>(variant, launch);
    case Dtype::kInt64:
      return cuda::launch_sum<uint64_t>(variant, launch);
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

// `call` with `device` as the current one.
template <class Call>
int on_device(int device, Call call) {
  int before = 0;
  int error = returned(cudaGetDevice(&before));
  if (error != cudaSuccess) {
    return error;
  }
  error = returned(cudaSetDevice(device));
  if (error == cudaSuccess) {
    error = call();
  }
  const int restored = returned(cudaSetDevice(before));
  return error == cudaSuccess ? restored : error;
}

int enable_peer(int device, int peer) {
  return on_device(device, [peer] {
    const int error = returned(cudaDeviceEnablePeerAccess(peer, 0));
    return error == cudaErrorPeerAccessAlreadyEnabled ? cudaSuccess : error;
  });
}

int register_host(int device, void* data, uint64_t size) {
  return on_device(device, [=] {
    return returned(cudaHostRegister(data, size, cudaHostRegisterPortable));
  });
}

int unregister_host(int device, void* data) {
  return on_device(
      device, [data] { return returned(cudaHostUnregister(data)); });
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
      &launch_send,
      &launch_row_sums,
      &num_multiprocessors,
      &has_code,
      &is_capturing,
      &enable_peer,
      &register_host,
      &unregister_host,
      &error_string};
}

} // namespace
} // namespace torchkv::kernels::cuda

const torchkv::kernels::cuda::Table* torchkv_cuda_table() {
  static const auto table = torchkv::kernels::cuda::make_table();
  return &table;
}

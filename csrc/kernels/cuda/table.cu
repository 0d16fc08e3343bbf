#include <cuda_runtime.h>

#include "dtypes.h"
#include "launch.h"

namespace torchkv::kernels::cuda {
namespace {

int launch_sum(Variant variant, Launch launch) {
  int error = cudaErrorInvalidValue;
  dispatch_dtype(variant.value, [&](auto value) {
    error = cuda::launch_sum<decltype(value)>(variant, launch);
  });
  return error;
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
      &launch_rates,
      &launch_copy,
      &launch_select_top,
      &launch_send,
      &launch_receive,
      &launch_row_sums,
      &launch_row_steps,
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

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
  if (before == device) {
    return call();
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

int driver_version() {
  int version = 0; // also if there is none
  return returned(cudaDriverGetVersion(&version)) == cudaSuccess ? version : 0;
}

Table make_table(int driver) {
  return {
      kAbi,
      driver >= 12010 ? static_cast<uint32_t>(kLargeParams)
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
  // NOLINTNEXTLINE(google-build-using-namespace)
  using namespace torchkv::kernels::cuda;
  static const int driver = driver_version();
  static const Table table = make_table(driver);
  // Code of one major version needs a driver of that version.
  const bool is_too_old = driver != 0 && driver / 1000 < CUDART_VERSION / 1000;
  return is_too_old ? nullptr : &table;
}

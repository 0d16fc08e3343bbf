#include "copy_thread.h"
#include "launch.h"

namespace torchkv::kernels::cuda {
namespace {

template <size_t kBytes>
__global__ void __launch_bounds__(kThreads, kCopyBlocksPerMultiprocessor)
    copy_kernel(const __grid_constant__ Params<kBytes> params) {
  copy_thread(params.head, params.bank, blockIdx.x, threadIdx.x);
}

template <size_t kBytes>
const void* kernel() {
  return reinterpret_cast<const void*>(&copy_kernel<kBytes>);
}

} // namespace

int launch_copy(Launch launch) {
  return launch_by_size(
      kernel<kSmallParams>(),
      kernel<kMediumParams>(),
      kernel<kLargeParams>(),
      launch);
}

int has_code(bool* result) {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, kernel<kSmallParams>());
  *result = error == cudaSuccess;
  const bool is_missing = error == cudaErrorNoKernelImageForDevice ||
      error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion;
  const int told = returned(error);
  return is_missing ? cudaSuccess : told;
}

} // namespace torchkv::kernels::cuda

#include "body.h"
#include "launch.h"

namespace torchkv::kernels::cuda {
namespace {

template <size_t kBytes>
__global__ void __launch_bounds__(kThreads, kCopyBlocksPerMultiprocessor)
    copy_kernel(const __grid_constant__ Params<kBytes> params) {
  copy_thread(params.head, params.bank, blockIdx.x, gridDim.x, threadIdx.x);
}

} // namespace

int launch_copy(
    const void* params,
    size_t params_bytes,
    uint32_t num_blocks,
    void* stream) {
  auto* const to = static_cast<cudaStream_t>(stream);
  if (params_bytes == kSmallParams) {
    copy_kernel<<<num_blocks, kThreads, 0, to>>>(
        *static_cast<const Params<kSmallParams>*>(params));
  } else {
    copy_kernel<<<num_blocks, kThreads, 0, to>>>(
        *static_cast<const Params<kLargeParams>*>(params));
  }
  return cudaGetLastError();
}

} // namespace torchkv::kernels::cuda

#include "launch.h"
#include "rate_thread.h"
#include "sum_thread.h"

namespace torchkv::kernels::cuda {
namespace {

template <size_t kBytes>
__global__ void __launch_bounds__(kThreads)
    rate_kernel(const __grid_constant__ Params<kBytes> params) {
  __shared__ Squares shares[kThreads];
  shares[threadIdx.x] =
      rate_share(params.head, params.bank, blockIdx.x, threadIdx.x);
  add_shares(shares, threadIdx.x, [] { __syncthreads(); });
  if (threadIdx.x == 0) {
    store_rate(
        params.head, params.bank, sizeof(params.bank), blockIdx.x, shares[0]);
  }
}

} // namespace

int launch_rates(Launch launch) {
  return launch_by_size(
      reinterpret_cast<const void*>(&rate_kernel<kSmallParams>),
      reinterpret_cast<const void*>(&rate_kernel<kMediumParams>),
      reinterpret_cast<const void*>(&rate_kernel<kLargeParams>),
      launch);
}

} // namespace torchkv::kernels::cuda

#pragma once

#include "dispatch.h"
#include "launch.h"
#include "sum_thread.h"

namespace torchkv::kernels::cuda {

template <typename P, size_t kBytes>
__global__ void __launch_bounds__(
    kThreads,
    bounded(blocks_per_multiprocessor(variant_of<P>())))
    sum_kernel(const __grid_constant__ Params<kBytes> params) {
  const auto share = sum_thread<P>(
      params.head, params.bank, sizeof(params.bank), blockIdx.x, threadIdx.x);
  if constexpr (P::kHasSquares) {
    __shared__ typename P::squares_t shares[kThreads];
    shares[threadIdx.x] = share;
    add_shares(shares, threadIdx.x, [] { __syncthreads(); });
    if (threadIdx.x == 0) {
      *squares_of<P>(params.head, params.bank, blockIdx.x) = shares[0];
    }
  }
}

// Launches the kernel of a variant with values of type V.
template <typename V>
int launch_sum(Variant variant, Launch launch) {
  int error = cudaErrorInvalidDeviceFunction;
  dispatch_sum<V>(variant, [&](auto sum) {
    using P = decltype(sum);
    error = launch_by_size(
        reinterpret_cast<const void*>(&sum_kernel<P, kSmallParams>),
        reinterpret_cast<const void*>(&sum_kernel<P, kMediumParams>),
        reinterpret_cast<const void*>(&sum_kernel<P, kLargeParams>),
        launch);
  });
  return error;
}

} // namespace torchkv::kernels::cuda

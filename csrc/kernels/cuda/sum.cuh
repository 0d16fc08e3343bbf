#pragma once

#include "body.h"
#include "dispatch.h"
#include "launch.h"

namespace torchkv::kernels::cuda {

template <typename P, size_t kBytes>
__global__ void __launch_bounds__(
    kThreads,
    blocks_per_multiprocessor(variant_of<P>()))
    sum_kernel(const __grid_constant__ Params<kBytes> params) {
  sum_thread<P>(
      params.head,
      params.bank,
      sizeof(params.bank),
      blockIdx.x,
      gridDim.x,
      threadIdx.x);
}

// Launches the kernel of a variant whose values are of type V.
template <typename V>
int launch_sum(
    Variant variant,
    const void* params,
    size_t params_bytes,
    uint32_t num_blocks,
    void* stream) {
  const bool found = dispatch_sum<V>(variant, [&](auto sum) {
    using P = decltype(sum);
    auto* const to = static_cast<cudaStream_t>(stream);
    if (params_bytes == kSmallParams) {
      sum_kernel<P><<<num_blocks, kThreads, 0, to>>>(
          *static_cast<const Params<kSmallParams>*>(params));
    } else {
      sum_kernel<P><<<num_blocks, kThreads, 0, to>>>(
          *static_cast<const Params<kLargeParams>*>(params));
    }
  });
  return found ? cudaGetLastError() : cudaErrorInvalidDeviceFunction;
}

} // namespace torchkv::kernels::cuda

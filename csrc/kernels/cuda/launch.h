#pragma once

#include "params.h"

// The launches of the .cu files; table.cu puts them into a Table.
namespace torchkv::kernels::cuda {

// REQUIRES: variant.value is V's dtype.
template <typename V>
int launch_sum(
    Variant variant,
    const void* params,
    size_t params_bytes,
    void* stream);

int launch_copy(const void* params, size_t params_bytes, void* stream);

// Whether there is code of copy.cu for the current device.
int has_code(bool* result);

#ifdef __CUDACC__

// An error that was returned must not look like one of the next call.
inline int returned(cudaError_t error) {
  if (error != cudaSuccess) {
    cudaGetLastError();
  }
  return error;
}

// Launches the one of three kernels whose parameters have that size. Unlike
// <<<>>>, this returns the status of the launch itself.
inline int launch_by_size(
    const void* small,
    const void* medium,
    const void* large,
    const void* params,
    size_t params_bytes,
    void* stream) {
  const void* const kernel = params_bytes == kSmallParams ? small
      : params_bytes == kMediumParams                     ? medium
                                                          : large;
  const auto num_blocks = static_cast<const ParamsHead*>(params)->num_chunks;
  void* arguments[] = {const_cast<void*>(params)}; // only read
  return returned(cudaLaunchKernel(
      kernel,
      dim3(num_blocks),
      dim3(kThreads),
      arguments,
      0,
      static_cast<cudaStream_t>(stream)));
}

#endif

} // namespace torchkv::kernels::cuda

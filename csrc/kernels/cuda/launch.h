#pragma once

#include "params.h"

// The launchers of the .cu files, which table.cu puts into a Table.
namespace torchkv::kernels::cuda {

// REQUIRES: variant.value is V's dtype.
template <typename V>
int launch_sum(Variant variant, Launch launch);

int launch_rates(Launch launch);
int launch_copy(Launch launch);
int launch_select_top(SelectTop call, void* stream);
int launch_send(Send send, void* stream);
int launch_receive(Receive call, void* stream);
int launch_row_sums(RowSums call, void* stream);
int launch_row_steps(RowSteps call, void* stream);

// Whether copy.cu was compiled for the current device.
int has_code(bool* result);

#ifdef __CUDACC__

// As many concurrent blocks as a multiprocessor has threads for: Turing's has
// 1024. PTX for Turing limits all GPUs for which it is assembled.
constexpr uint32_t bounded(uint32_t num_blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return num_blocks < 1024 / kThreads ? num_blocks : 1024 / kThreads;
#else
  return num_blocks;
#endif
}

// Clears the error, or it would be reported again by the next call.
inline int returned(cudaError_t error) {
  if (error != cudaSuccess) {
    cudaGetLastError();
  }
  return error;
}

// Launches the one of three kernels with parameters of that size. Unlike
// <<<>>>, returns the status of the launch itself.
inline int launch_by_size(
    const void* small,
    const void* medium,
    const void* large,
    const Launch& launch) {
  const void* const kernel = launch.params_bytes == kSmallParams ? small
      : launch.params_bytes == kMediumParams                     ? medium
                                                                 : large;
  const auto num_blocks =
      static_cast<const ParamsHead*>(launch.params)->num_chunks;
  void* arguments[] = {const_cast<void*>(launch.params)}; // only read
  return returned(cudaLaunchKernel(
      kernel,
      dim3(num_blocks),
      dim3(kThreads),
      arguments,
      0,
      static_cast<cudaStream_t>(launch.stream)));
}

#endif

} // namespace torchkv::kernels::cuda

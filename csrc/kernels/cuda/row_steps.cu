#include "launch.h"
#include "row_step_thread.h"

namespace torchkv::kernels::cuda {
namespace {

template <typename V, typename S, int kSize>
__global__ void __launch_bounds__(kThreads, kRowStepBlocksPerMultiprocessor)
    row_step_kernel(
        const __grid_constant__ RowStepParams<arithmetic_t<S>> params) {
  row_step_thread<V, S, kSize>(params, blockIdx.x, threadIdx.x);
}

template <typename V, typename S, int kSize>
int launch(const RowSteps& call, void* stream) {
  RowStepParams<arithmetic_t<S>> params(call);
  void* arguments[] = {&params};
  return returned(cudaLaunchKernel(
      reinterpret_cast<const void*>(&row_step_kernel<V, S, kSize>),
      dim3(num_row_blocks<kSize>(call.gradients)),
      dim3(kThreads),
      arguments,
      0,
      static_cast<cudaStream_t>(stream)));
}

} // namespace

int launch_row_steps(RowSteps call, void* stream) {
  int error = cudaErrorInvalidDeviceFunction;
  dispatch_row_steps(call, [&](auto value, auto stored) {
    using V = decltype(value);
    using S = decltype(stored);
    error = call.gradients.is_aligned
        ? launch<V, S, kRowStepPack<S>>(call, stream)
        : launch<V, S, 1>(call, stream);
  });
  return error;
}

} // namespace torchkv::kernels::cuda

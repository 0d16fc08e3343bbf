#include "dtypes.h"
#include "launch.h"
#include "row_sum_thread.h"

namespace torchkv::kernels::cuda {
namespace {

template <typename V, int kSize>
__global__ void __launch_bounds__(kThreads, kRowBlocksPerMultiprocessor)
    row_sum_kernel(const __grid_constant__ RowSums call) {
  row_sum_thread<V, kSize>(call, blockIdx.x, threadIdx.x);
}

template <typename V, int kSize>
int launch_packs(RowSums call, void* stream) {
  void* arguments[] = {&call};
  return returned(cudaLaunchKernel(
      reinterpret_cast<const void*>(&row_sum_kernel<V, kSize>),
      dim3(num_row_blocks<kSize>(call)),
      dim3(kThreads),
      arguments,
      0,
      static_cast<cudaStream_t>(stream)));
}

template <typename V>
int launch(const RowSums& call, void* stream) {
  return call.is_aligned ? launch_packs<V, kRowPack<V>>(call, stream)
                         : launch_packs<V, 1>(call, stream);
}

} // namespace

int launch_row_sums(RowSums call, void* stream) {
  int error = cudaErrorInvalidValue;
  dispatch_dtype(call.value, [&](auto value) {
    error = launch<decltype(value)>(call, stream);
  });
  return error;
}

} // namespace torchkv::kernels::cuda

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
  const int64_t num_blocks =
      (num_row_packs<kSize>(call) + kThreads - 1) / kThreads;
  void* arguments[] = {&call};
  return returned(cudaLaunchKernel(
      reinterpret_cast<const void*>(&row_sum_kernel<V, kSize>),
      dim3(static_cast<uint32_t>(num_blocks)),
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
  switch (call.value) {
    case Dtype::kFloat:
      return launch<float>(call, stream);
    case Dtype::kHalf:
      return launch<Half>(call, stream);
    case Dtype::kBFloat16:
      return launch<BFloat16>(call, stream);
    case Dtype::kDouble:
      return launch<double>(call, stream);
    case Dtype::kBool:
      return launch<Bool>(call, stream);
    case Dtype::kInt8:
      return launch<uint8_t>(call, stream);
    case Dtype::kInt16:
      return launch<uint16_t>(call, stream);
    case Dtype::kInt32:
      return launch<uint32_t>(call, stream);
    case Dtype::kInt64:
      return launch<uint64_t>(call, stream);
  }
  return cudaErrorInvalidValue;
}

} // namespace torchkv::kernels::cuda

#include "launch.h"
#include "select_top_thread.h"

namespace torchkv::kernels::cuda {
namespace {

// A row of blocks for each value.
template <typename V>
__global__ void __launch_bounds__(kThreads, kSendBlocksPerMultiprocessor)
    top_count_kernel(
        const __grid_constant__ SelectTop call,
        const TopPass pass,
        const int64_t num_chunks) {
  __shared__ uint32_t counts[kTopDigits];
  if (is_found(call, pass, blockIdx.y)) {
    return;
  }
  for (uint32_t i = threadIdx.x; i < kTopDigits; i += kThreads) {
    counts[i] = 0;
  }
  __syncthreads();
  for (int64_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    uint32_t digits[kSendPack];
    find_top_digits<V>(call, pass, blockIdx.y, chunk, threadIdx.x, digits);
    TORCHKV_UNROLL
    for (int i = 0; i < kSendPack; ++i) {
      if (digits[i] != kNoTopDigit) {
        atomicAdd(&counts[digits[i]], 1U);
      }
    }
  }
  __syncthreads();
  // Sums of integers do not depend on the order.
  auto* const all = reinterpret_cast<unsigned long long*>(
      call.values[blockIdx.y].state->counts);
  for (uint32_t i = threadIdx.x; i < kTopDigits; i += kThreads) {
    if (counts[i] != 0) {
      atomicAdd(&all[i], static_cast<unsigned long long>(counts[i]));
    }
  }
}

// A block for each value.
__global__ void __launch_bounds__(kThreads) top_choice_kernel(
    const __grid_constant__ SelectTop call,
    const TopPass pass) {
  __shared__ int64_t sums[kThreads];
  if (is_found(call, pass, blockIdx.x)) {
    return;
  }
  TopChoice choice(call, pass, blockIdx.x, threadIdx.x);
  sums[threadIdx.x] = choice.sum();
  __syncthreads();
  choice.choose(call, pass, sums);
}

template <typename V>
int launch_pass(SelectTop call, TopPass pass, void* stream) {
  int64_t num_chunks = num_top_chunks(call);
  const auto num_blocks =
      static_cast<uint32_t>(std::min(num_chunks, kMaxTopBlocks));
  void* arguments[] = {&call, &pass, &num_chunks};
  const int error = returned(cudaLaunchKernel(
      reinterpret_cast<const void*>(&top_count_kernel<V>),
      dim3(num_blocks, call.num_values),
      dim3(kThreads),
      arguments,
      0,
      static_cast<cudaStream_t>(stream)));
  if (error != cudaSuccess) {
    return error;
  }
  return returned(cudaLaunchKernel(
      reinterpret_cast<const void*>(&top_choice_kernel),
      dim3(call.num_values),
      dim3(kThreads),
      arguments,
      0,
      static_cast<cudaStream_t>(stream)));
}

} // namespace

int launch_select_top(SelectTop call, void* stream) {
  int error = cudaErrorInvalidDeviceFunction;
  dispatch_select_top(call, [&](auto value) {
    using V = decltype(value);
    error = cudaSuccess;
    for_each_top_pass<V>(call.num_elements, [&](const TopPass& pass) {
      if (error == cudaSuccess) {
        error = launch_pass<V>(call, pass, stream);
      }
    });
  });
  return error;
}

} // namespace torchkv::kernels::cuda

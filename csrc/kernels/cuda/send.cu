#include "launch.h"
#include "send_thread.h"

namespace torchkv::kernels::cuda {
namespace {

template <typename V, Codec::Id kCodec, bool kPacks>
__global__ void __launch_bounds__(kThreads, kSendBlocksPerMultiprocessor)
    send_kernel(const __grid_constant__ Send send) {
  using Thread = SendThread<V, kCodec, kPacks>;
  Thread thread(blockIdx.x, threadIdx.x);
  thread.begin(send);
  TORCHKV_NO_UNROLL
  for (uint32_t k = 0; k < send.num_values; ++k) {
    thread.load(send, k);
    if constexpr (Thread::kThreadsOfScale != 0) {
      constexpr uint32_t kGroup = Thread::kThreadsOfScale;
      __shared__ typename Thread::number_t shares[kThreads];
      __syncthreads(); // the value before has been scaled
      shares[threadIdx.x] = thread.largest();
      TORCHKV_UNROLL
      for (uint32_t half = kGroup / 2; half > 0; half /= 2) {
        __syncthreads();
        keep_larger<kGroup>(shares, threadIdx.x, half);
      }
      __syncthreads();
      thread.scale_by(shares[threadIdx.x / kGroup * kGroup]);
    }
    thread.add(send, k);
  }
  thread.finish(send);
}

} // namespace

int launch_send(Send send, void* stream) {
  int error = cudaErrorInvalidDeviceFunction;
  dispatch_send(send, [&](auto tag) {
    using Thread = typename decltype(tag)::type;
    const auto num_blocks = static_cast<uint32_t>(
        (send.num_elements + kSendChunk - 1) / kSendChunk);
    void* arguments[] = {&send};
    error = returned(cudaLaunchKernel(
        reinterpret_cast<const void*>(&send_kernel<
                                      typename Thread::value_t,
                                      Thread::kId,
                                      Thread::kPacksCodes>),
        dim3(num_blocks),
        dim3(kThreads),
        arguments,
        0,
        static_cast<cudaStream_t>(stream)));
  });
  return error;
}

} // namespace torchkv::kernels::cuda

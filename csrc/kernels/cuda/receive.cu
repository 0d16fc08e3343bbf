#include "launch.h"
#include "receive_thread.h"

namespace torchkv::kernels::cuda {
namespace {

template <typename T, Codec::Id kCodec>
__global__ void __launch_bounds__(kThreads, kSendBlocksPerMultiprocessor)
    receive_kernel(const __grid_constant__ Receive call) {
  receive_thread<T, kCodec>(call, blockIdx.x, threadIdx.x);
}

} // namespace

int launch_receive(Receive call, void* stream) {
  int error = cudaErrorInvalidDeviceFunction;
  dispatch_receive(call, [&](auto tag) {
    using Tag = decltype(tag);
    void* arguments[] = {&call};
    error = returned(cudaLaunchKernel(
        reinterpret_cast<const void*>(
            &receive_kernel<typename Tag::number_t, Tag::kId>),
        dim3(num_receive_blocks(call)),
        dim3(kThreads),
        arguments,
        0,
        static_cast<cudaStream_t>(stream)));
  });
  return error;
}

} // namespace torchkv::kernels::cuda

#include "sum.cuh"

namespace torchkv::kernels::cuda {

template int launch_sum<Half>(Variant, const void*, size_t, void*);

} // namespace torchkv::kernels::cuda

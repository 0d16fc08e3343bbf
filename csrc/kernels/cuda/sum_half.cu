#include "sum.cuh"

namespace torchkv::kernels::cuda {

template int launch_sum<Half>(Variant, Launch);

} // namespace torchkv::kernels::cuda

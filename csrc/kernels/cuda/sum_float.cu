#include "sum.cuh"

namespace torchkv::kernels::cuda {

template int launch_sum<float>(Variant, Launch);

} // namespace torchkv::kernels::cuda

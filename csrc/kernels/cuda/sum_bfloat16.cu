#include "sum.cuh"

namespace torchkv::kernels::cuda {

template int launch_sum<BFloat16>(Variant, Launch);

} // namespace torchkv::kernels::cuda

#include "sum.cuh"

namespace torchkv::kernels::cuda {

template int launch_sum<double>(Variant, Launch);
template int launch_sum<Bool>(Variant, Launch);
template int launch_sum<uint8_t>(Variant, Launch);
template int launch_sum<uint16_t>(Variant, Launch);
template int launch_sum<uint32_t>(Variant, Launch);
template int launch_sum<uint64_t>(Variant, Launch);

} // namespace torchkv::kernels::cuda

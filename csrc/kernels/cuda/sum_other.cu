#include "sum.cuh"

namespace torchkv::kernels::cuda {

template int launch_sum<double>(Variant, const void*, size_t, void*);
template int launch_sum<Bool>(Variant, const void*, size_t, void*);
template int launch_sum<uint8_t>(Variant, const void*, size_t, void*);
template int launch_sum<uint16_t>(Variant, const void*, size_t, void*);
template int launch_sum<uint32_t>(Variant, const void*, size_t, void*);
template int launch_sum<uint64_t>(Variant, const void*, size_t, void*);

} // namespace torchkv::kernels::cuda

#pragma once

#include "params.h"

// The launches of the .cu files; table.cu puts them into a Table.
namespace torchkv::kernels::cuda {

// REQUIRES: variant.value is V's dtype.
template <typename V>
int launch_sum(
    Variant variant,
    const void* params,
    size_t params_bytes,
    uint32_t num_blocks,
    void* stream);

int launch_copy(
    const void* params,
    size_t params_bytes,
    uint32_t num_blocks,
    void* stream);

} // namespace torchkv::kernels::cuda

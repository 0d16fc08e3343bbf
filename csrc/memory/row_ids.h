#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "../core/export.h"
#include "../core/row_sparse.h"
#include "../kernels/cpu/row_ids.h"

namespace torchkv {

// Gives `rows` the ids, sorted, with the order of their rows. REQUIRES: int64,
// contiguous in CPU memory, in [0, limit). `found`: by inspect_row_ids.
TORCHKV_API void set_ids(
    const RowSparse& rows,
    const at::Tensor& ids,
    int64_t limit,
    const kernels::cpu::RowIdsFound& found);
TORCHKV_API void set_ids(
    const RowSparse& rows,
    const at::Tensor& ids,
    int64_t limit);

// Gives `rows` the ids that are on a device only; blocks the host until the
// device has them. By the thread of the call that pushed the rows. IndexError
// if one is no longer a row of the value.
TORCHKV_API void bring_ids(const RowSparse& rows);

} // namespace torchkv

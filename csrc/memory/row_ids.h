#pragma once

#include <cstdint>

#include "../core/export.h"
#include "../core/row_sparse.h"
#include "../kernels/cpu/row_ids.h"

namespace torchkv {

// Sorts ids that are below `limit`, with the order of their rows. `found`: by
// inspect_row_ids.
TORCHKV_API void sort_rows(int64_t limit, RowSparse& rows);
TORCHKV_API void sort_rows(
    int64_t limit,
    const kernels::cpu::RowIdsFound& found,
    const RowSparse& rows);

// Brings the ids to the host if they are on a device only, and sorts them;
// blocks the host until the device has them. By the thread of the call that
// pushed the rows.
TORCHKV_API void bring_ids(const RowSparse& rows);

} // namespace torchkv

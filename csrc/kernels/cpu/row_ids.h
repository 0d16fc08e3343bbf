#pragma once

#include <cstdint>

#include "../../core/export.h"

namespace torchkv::kernels::cpu {

// What a pass over row ids finds.
struct RowIdsFound {
  int64_t first_bad = -1; // index of the first id outside [0, num_rows), if any
  bool is_ascending = true; // if none is bad
  bool is_distinct = true; // if they are ascending
};
TORCHKV_API RowIdsFound
inspect_row_ids(const int64_t* ids, int64_t num_ids, int64_t num_rows);

// Writes the ids in ascending order, and the index that each had; equal ones
// keep their order. REQUIRES: ids in [0, num_rows).
TORCHKV_API void sort_row_ids(
    const int64_t* ids,
    int64_t num_ids,
    int64_t num_rows,
    int64_t* sorted,
    int64_t* order);

} // namespace torchkv::kernels::cpu

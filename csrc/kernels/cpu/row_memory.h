#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../../core/export.h"
#include "../../core/row_init.h"

namespace torchkv::kernels::cpu {

// Rows of a row-sparse value, which follow one another in memory.
struct RowMemory {
  char* data = nullptr;
  int64_t row_size = 0; // elements
  c10::ScalarType dtype = c10::kFloat;

  int64_t row_bytes() const {
    return row_size * static_cast<int64_t>(c10::elementSize(dtype));
  }
};

// out[i] = rows[slots[i]] or, where the slot is -1, the initial value of the
// row with this id. REQUIRES: `out` has `count` rows of the same kind.
TORCHKV_API void gather_rows(
    const RowMemory& rows,
    const int64_t* slots,
    const int64_t* ids,
    int64_t count,
    const RowInit& init,
    char* out);

// rows[slots[i]] = given[i]. REQUIRES: distinct slots.
TORCHKV_API void scatter_rows(
    const RowMemory& rows,
    const int64_t* slots,
    int64_t count,
    const char* given);

// rows[to[i]] = rows[from[i]], in order.
TORCHKV_API void move_rows(
    const RowMemory& rows,
    const int64_t* from,
    const int64_t* to,
    int64_t count);

// rows[i] = the initial value of the row with id ids[i], in the dtype of the
// rows. Elements of a normal distribution are the quantiles of uniform numbers,
// by algorithm AS241 (Wichura, Applied Statistics 37, 1988) with arithmetic
// that has the same bits on every machine.
// REQUIRES: zeros, or a dtype that can_init says.
TORCHKV_API void init_rows(
    const RowMemory& rows,
    const int64_t* ids,
    int64_t count,
    const RowInit& init);

// Whether rows of a dtype can have initial values other than zeros.
inline bool can_init(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kHalf ||
      dtype == c10::kBFloat16;
}

} // namespace torchkv::kernels::cpu

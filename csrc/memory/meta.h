#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace torchkv {

// What a key's values are checked against. Immutable, so checks need no lock.
struct Meta {
  c10::SmallVector<int64_t, 4> sizes;
  c10::ScalarType dtype = c10::kFloat;
  int64_t num_elements = 0;
  // The first dimension of `sizes` is of the rows that the value may have, not
  // of those that it has.
  bool is_row_sparse = false;
  // Of a row-sparse value: as many as 64 bits can count the elements of.
  bool has_unlimited_rows = false;

  // Of a dense value, which takes memory from the beginning.
  int64_t num_bytes() const {
    return is_row_sparse
        ? 0
        : num_elements * static_cast<int64_t>(c10::elementSize(dtype));
  }
  int64_t row_size() const {
    int64_t size = 1;
    for (size_t i = 1; i < sizes.size(); ++i) {
      size *= sizes[i];
    }
    return size;
  }
};

} // namespace torchkv

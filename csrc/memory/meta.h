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

  int64_t num_bytes() const {
    return num_elements * static_cast<int64_t>(c10::elementSize(dtype));
  }
};

} // namespace torchkv

#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../core/export.h"

namespace torchkv {

// A stored value that is to be shared out.
struct Extent {
  int64_t num_elements = 0;
  int64_t element_size = 1; // bytes
};

// Elements [begin, end) of a value, at a place.
struct Piece {
  size_t value = 0;
  size_t place = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// Shares values out over places that hold `loads` bytes already, so that all
// hold alike as far as that is possible: their elements, one value behind the
// other, are cut where a place is full. Cuts are multiples of `grain` bytes, a
// power of two of at least 16, within a value: smaller values stay whole.
// In the order of the values and their elements.
// REQUIRES: at least one place.
TORCHKV_API std::vector<Piece> cut_all(
    c10::ArrayRef<Extent> values,
    c10::ArrayRef<int64_t> loads,
    int64_t grain);

// Cuts each value into as many pieces of one size as there are places, in their
// order, the last perhaps smaller, and multiples of 16 bytes. A value of less
// than `grain` bytes a piece goes to the place with the least.
TORCHKV_API std::vector<Piece> cut_each(
    c10::ArrayRef<Extent> values,
    c10::ArrayRef<int64_t> loads,
    int64_t grain);

} // namespace torchkv

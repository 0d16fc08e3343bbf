#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../core/export.h"

namespace torchkv {

// A stored value to shard.
struct ValueSize {
  int64_t num_elements = 0;
  int64_t element_size = 1; // bytes
};

// Elements [begin, end) of a value, and the index of their place.
struct Shard {
  size_t value = 0;
  size_t place = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// Distributes values as evenly as possible over places that already hold
// `loads` bytes: a place is filled with the elements of the values, in order,
// before the next. Within a value, boundaries are multiples of `grain` bytes, a
// power of two of at least 16; smaller values stay whole. Returns the shards in
// the order of the values and their elements. REQUIRES: at least one place.
TORCHKV_API std::vector<Shard> shard_all(
    c10::ArrayRef<ValueSize> values,
    c10::ArrayRef<int64_t> loads,
    int64_t grain);

// Divides each value into as many shards of one size as there are places, in
// their order, the last perhaps smaller; sizes are multiples of 16 bytes. A
// value of less than `grain` bytes per shard goes to the place with the least.
TORCHKV_API std::vector<Shard> shard_each(
    c10::ArrayRef<ValueSize> values,
    c10::ArrayRef<int64_t> loads,
    int64_t grain);

} // namespace torchkv

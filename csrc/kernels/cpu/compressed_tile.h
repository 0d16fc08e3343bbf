#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <cstring>

#include "../../core/codec.h"
#include "../../core/export.h"
#include "access.h"

namespace torchkv::kernels::cpu {

class PackedCodes;

// What one replica pushes: a dense value if the codec is none, or what the
// codec sends of it (core/compressed.h), or what one has sent.
struct CompressedSource {
  const PackedCodes* codes = nullptr; // not null: there is nothing else
  const char* data = nullptr; // from the first element of a sum
  c10::ScalarType dtype = c10::kFloat;
  Codec codec;
  char* residual = nullptr; // from the same element; null if the codec has none
  uint64_t stream = 0;
  // The greatest finite magnitudes of the value's blocks, or null where they
  // are found on the way: then the sum begins with a block.
  const char* largest = nullptr;
  uint64_t least_bits = 0;
  int64_t ties_end = 0;
};

// Elements that are processed together: buffers of them fit into the
// first-level cache, and so does each block with one scale.
constexpr int64_t kTile = 1024;

// Up to kTile elements of a source, with buffers for as many. T: float or
// double, in which codecs compute.
template <typename T>
struct CompressedTile {
  const char* data;
  T* residual; // null without error feedback
  T* kept; // receives the next residual; may be `residual`
  T* buffer;
  T* total;
  bool is_add; // to the total
  int64_t size;
};

// `size` numbers of any dtype plus the residuals (null: zeros), as T.
template <typename T>
void load_sum(
    const char* data,
    c10::ScalarType dtype,
    const T* residual,
    T* sum,
    int64_t size) {
  const bool is_add = residual != nullptr;
  if (is_add) {
    std::memcpy(sum, residual, size * sizeof(T));
  }
  const auto stride = static_cast<int64_t>(c10::elementSize(dtype));
  access<T>(dtype).load(data, stride, is_add, sum, size);
}

// Makes what the codec of a source sends of a tile the total, or adds it to it.
// The tile's first element is number `index` of the value.
template <typename T>
void add_sent(
    const CompressedSource& source,
    const CompressedTile<T>& tile,
    int64_t index);

// The greatest finite magnitude of each block of `block_size` elements of the
// sums of a value and a residual (null: zeros), into `largest`, which has
// residual_dtype, as the residual; fp32 or fp64. Uses PyTorch's intra-op
// threads.
TORCHKV_API void block_magnitudes(
    const char* value,
    c10::ScalarType dtype,
    const char* residual,
    c10::ScalarType residual_dtype,
    int64_t num_elements,
    int64_t block_size,
    char* largest);

} // namespace torchkv::kernels::cpu

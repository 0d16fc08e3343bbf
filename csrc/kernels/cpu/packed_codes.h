#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>

#include "../../core/codec.h"
#include "../../core/export.h"
#include "compressed_tile.h"

namespace torchkv::kernels::cpu {

// What a codec sends of part of a value, packed into bytes. In the order of
// memory, little-endian and without gaps, where T is fp32 or fp64, in which the
// codec computes, a tile has kTile elements but for the last, and a block has
// the elements with one scale:
//
//   header  32 bytes, see packed_format.h
//   1bit    a bit of each element: words of 32 bits
//   2bit    2 bits of each element: likewise
//   fp16, bf16, fp8
//           the numbers; of fp8 after a scale (T) for each block
//   int4    a scale for each block; 4 bits of each element, as 2bit
//   topk    for each tile, where its numbers end (int64); the numbers (T) that
//           are sent; their indices in their tiles (uint16)
//
// A tile has the fewest words that hold it, w: the bits of element i are in
// word i % w, at position i / w from the low bits on, so that loops vectorize.

// The codes in memory that outlives this.
class TORCHKV_API PackedCodes {
 public:
  // ValueError, if these cannot be the codes of so many elements.
  PackedCodes(const char* data, int64_t num_bytes, int64_t num_elements);

  c10::ScalarType dtype() const { // T
    return dtype_;
  }
  int64_t bytes_per_element() const; // about

  // Makes `size` numbers from element `first` on, of a tile, the total, or adds
  // them to it. `buffer` has room for a tile of T.
  template <typename Total>
  void add(int64_t first, int64_t size, bool is_add, void* buffer, Total* total)
      const;

 private:
  template <typename T>
  void read_tile(int64_t first, int64_t size, T* sent) const;
  template <typename T>
  void read_top(int64_t first, int64_t size, T* sent) const;

  Codec codec_;
  c10::ScalarType dtype_ = c10::kFloat;
  int64_t block_begin_ = 0; // of the first element, in its block
  int64_t num_sent_ = 0; // of topk
  const char* scales_ = nullptr; // or the ends of topk's tiles
  const char* codes_ = nullptr;
  const char* indices_ = nullptr;
};

// Packs what the codec of a source sends of its elements from `begin` of the
// value on, and leaves the residual: `source` is from there on, as in
// CompressedSum, and has the greatest magnitudes of the blocks if its codec has
// blocks. `allocate` is called once, for the bytes. Uses PyTorch's intra-op
// threads.
TORCHKV_API void pack_codes(
    const CompressedSource& source,
    int64_t begin,
    int64_t num_elements,
    c10::ScalarType dtype, // T
    c10::function_ref<char*(int64_t num_bytes)> allocate);

} // namespace torchkv::kernels::cpu

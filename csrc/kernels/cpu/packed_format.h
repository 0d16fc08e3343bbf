#pragma once

// Private to pack_codes.cpp and packed_codes.cpp.

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../../core/codec.h"
#include "compressed_tile.h"

namespace torchkv::kernels::cpu::packed {

using Id = Codec::Id;

struct Header {
  uint8_t codec = 0; // Codec::Id
  uint8_t size = 0; // of T
  uint16_t zero = 0;
  uint32_t block_begin = 0; // of the first element, in its block
  int64_t num_elements = 0;
  int64_t num_sent = 0; // of topk
  double threshold = 0; // of 2bit
};
inline constexpr int64_t kHeaderSize = sizeof(Header);
static_assert(kHeaderSize == 32);

constexpr int64_t num_blocks(int64_t begin, int64_t size, int64_t block_size) {
  return block_size == 0 || size == 0 ? 0 : (begin + size - 1) / block_size + 1;
}
constexpr int64_t num_tiles(int64_t num_elements) {
  return (num_elements + kTile - 1) / kTile;
}

// Bits of an element in words of 32; 0: not in words.
inline int bits_of(Id id) {
  return id == Id::k1Bit ? 1 : id == Id::k2Bit ? 2 : id == Id::kInt4 ? 4 : 0;
}
inline int64_t words_of(int bits, int64_t num_elements) {
  const int64_t each = 32 / bits;
  return (num_elements + each - 1) / each;
}

inline int64_t bytes_of_codes(Id id, int64_t num_elements) {
  if (const int bits = bits_of(id)) {
    return 4 * words_of(bits, num_elements);
  }
  return id == Id::kFp8 ? num_elements : 2 * num_elements;
}

template <typename T>
T number_at(const char* from, int64_t index) {
  T value;
  std::memcpy(
      &value, from + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}
template <typename T>
void set_number(char* to, int64_t index, T value) {
  std::memcpy(to + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

inline c10::ScalarType half_type(Id id) {
  return id == Id::kFp16 ? c10::kHalf : c10::kBFloat16;
}

// Calls `visit(i, size, block)` for the elements [i, i + size) of [0, size)
// that are in one block of the codes, where `first` is element 0's index in it.
template <class Visit>
void for_each_scale(
    int64_t first,
    int64_t num_elements,
    int64_t block_size,
    Visit visit) {
  for (int64_t i = 0; i < num_elements;) {
    const int64_t size =
        std::min(block_size - (first + i) % block_size, num_elements - i);
    visit(i, size, (first + i) / block_size);
    i += size;
  }
}

} // namespace torchkv::kernels::cpu::packed

#include "packed_codes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "../codes.h"
#include "access.h"
#include "cache_line.h"
#include "clones.h"
#include "packed_format.h"

namespace torchkv::kernels::cpu {
namespace {

using namespace packed;

template <int Bits>
TORCHKV_CLONES void unpack_words(
    const uint32_t* words,
    int64_t size,
    uint32_t* codes) {
  constexpr uint32_t kMask = (uint32_t{1} << uint32_t{Bits}) - 1;
  const int64_t count = (size + 32 / Bits - 1) / (32 / Bits);
  uint32_t shift = 0;
  for (int64_t begin = 0; begin < size; begin += count, shift += Bits) {
    const int64_t line = std::min(count, size - begin);
    for (int64_t i = 0; i < line; ++i) {
      codes[begin + i] = (words[i] >> shift) & kMask;
    }
  }
}

template <typename T>
TORCHKV_CLONES void value_1bit(const uint32_t* codes, int64_t size, T* sent) {
  for (int64_t i = 0; i < size; ++i) {
    sent[i] = codecs::number_1bit<T>(codes[i]);
  }
}

template <typename T>
TORCHKV_CLONES void value_2bit(
    const uint32_t* codes,
    T threshold,
    int64_t size,
    T* sent) {
  for (int64_t i = 0; i < size; ++i) {
    sent[i] = codecs::number_2bit(codes[i], threshold);
  }
}

template <typename T>
TORCHKV_CLONES void value_int4(
    const uint32_t* codes,
    T scale,
    int64_t size,
    T* sent) {
  for (int64_t i = 0; i < size; ++i) {
    sent[i] = codecs::number_int4(codes[i], scale);
  }
}

template <typename T>
TORCHKV_CLONES void value_fp8(
    const unsigned char* codes,
    T scale,
    int64_t size,
    T* sent) {
  for (int64_t i = 0; i < size; ++i) {
    sent[i] = codecs::number_fp8(codes[i], scale);
  }
}

template <typename Total, typename T>
TORCHKV_CLONES void add_tile(
    const T* sent,
    int64_t size,
    bool is_add,
    Total* total) {
  for (int64_t i = 0; i < size; ++i) {
    const auto value = static_cast<Total>(sent[i]);
    total[i] = is_add ? total[i] + value : value;
  }
}

} // namespace

PackedCodes::PackedCodes(
    const char* data,
    int64_t num_bytes,
    int64_t num_elements) {
  Header header;
  const auto expect = [&](bool condition) {
    TORCH_CHECK_VALUE(
        condition,
        "push: expected the codes of ",
        num_elements,
        " compressed elements, but got ",
        num_bytes,
        " bytes of another form");
  };
  expect(num_bytes >= kHeaderSize);
  std::memcpy(&header, data, sizeof(header));
  expect(
      header.codec > static_cast<uint8_t>(Id::kNone) &&
      header.codec <= static_cast<uint8_t>(Id::kTopK) &&
      (header.size == sizeof(float) || header.size == sizeof(double)) &&
      header.zero == 0 && header.num_elements == num_elements);
  codec_.id = static_cast<Id>(header.codec);
  codec_.threshold = header.threshold;
  dtype_ = header.size == sizeof(float) ? c10::kFloat : c10::kDouble;
  block_begin_ = header.block_begin;
  num_sent_ = header.num_sent;
  const bool is_top = codec_.id == Id::kTopK;
  const int64_t block_size = codec_.block_size();
  expect(
      block_begin_ < std::max<int64_t>(block_size, 1) && num_sent_ >= 0 &&
      num_sent_ <= (is_top ? num_elements : 0));
  const int64_t before = is_top
      ? 8 * num_tiles(num_elements)
      : num_blocks(block_begin_, num_elements, block_size) * header.size;
  const int64_t size = is_top ? num_sent_ * header.size
                              : bytes_of_codes(codec_.id, num_elements);
  const int64_t after =
      is_top ? num_sent_ * static_cast<int64_t>(sizeof(uint16_t)) : 0;
  expect(num_bytes == kHeaderSize + before + size + after);
  scales_ = data + kHeaderSize;
  codes_ = scales_ + before;
  indices_ = codes_ + size;
  int64_t begin = 0;
  for (int64_t tile = 0; is_top && tile < num_tiles(num_elements); ++tile) {
    const auto end = number_at<int64_t>(scales_, tile);
    expect(end >= begin && end <= num_sent_);
    begin = end;
  }
  expect(begin == num_sent_);
}

int64_t PackedCodes::bytes_per_element() const {
  return codec_.id == Id::kFp16 || codec_.id == Id::kBf16 ? 2 : 1;
}

template <typename T>
void PackedCodes::read_top(int64_t first, int64_t size, T* sent) const {
  std::fill(sent, sent + size, T(0));
  // In memory that another process may write, numbers may have changed since
  // they were checked.
  const int64_t tile = first / kTile;
  const int64_t end = std::min(number_at<int64_t>(scales_, tile), num_sent_);
  const int64_t begin = tile == 0 ? 0 : number_at<int64_t>(scales_, tile - 1);
  for (int64_t i = std::max<int64_t>(begin, 0); i < end; ++i) {
    const auto index = number_at<uint16_t>(indices_, i);
    if (index < size) {
      sent[index] = number_at<T>(codes_, i);
    }
  }
}

template <typename T>
void PackedCodes::read_tile(int64_t first, int64_t size, T* sent) const {
  const Id id = codec_.id;
  if (id == Id::kTopK) {
    read_top(first, size, sent);
    return;
  }
  const char* const codes = codes_ + bytes_of_codes(id, first);
  if (id == Id::kFp16 || id == Id::kBf16) {
    access<T>(half_type(id)).load(codes, 2, /*is_add=*/false, sent, size);
    return;
  }
  alignas(kCacheLine) uint32_t numbers[kTile];
  alignas(kCacheLine) uint32_t words[kTile];
  if (id != Id::kFp8) {
    std::memcpy(words, codes, bytes_of_codes(id, size));
  }
  if (id == Id::k1Bit) {
    unpack_words<1>(words, size, numbers);
    value_1bit(numbers, size, sent);
  } else if (id == Id::k2Bit) {
    unpack_words<2>(words, size, numbers);
    value_2bit(numbers, static_cast<T>(codec_.threshold), size, sent);
  } else {
    if (id == Id::kInt4) {
      unpack_words<4>(words, size, numbers);
    }
    for_each_scale(
        block_begin_ + first,
        size,
        codec_.block_size(),
        [&](int64_t i, int64_t count, int64_t block) {
          const T scale = number_at<T>(scales_, block);
          if (id == Id::kFp8) {
            value_fp8(
                reinterpret_cast<const unsigned char*>(codes) + i,
                scale,
                count,
                sent + i);
          } else {
            value_int4(numbers + i, scale, count, sent + i);
          }
        });
  }
}

template <typename Total>
void PackedCodes::add(
    int64_t first,
    int64_t size,
    bool is_add,
    void* buffer,
    Total* total) const {
  const auto add_as = [&](auto* sent) {
    read_tile(first, size, sent);
    add_tile(sent, size, is_add, total);
  };
  if (dtype_ == c10::kDouble) {
    add_as(static_cast<double*>(buffer));
  } else {
    add_as(static_cast<float*>(buffer));
  }
}

template void PackedCodes::add<float>(
    int64_t first,
    int64_t size,
    bool is_add,
    void* buffer,
    float* total) const;
template void PackedCodes::add<double>(
    int64_t first,
    int64_t size,
    bool is_add,
    void* buffer,
    double* total) const;

} // namespace torchkv::kernels::cpu

#include <algorithm>
#include <cstring>
#include <vector>

#include "../codes.h"
#include "access.h"
#include "cache_line.h"
#include "chunks.h"
#include "clones.h"
#include "packed_codes.h"
#include "packed_format.h"

namespace torchkv::kernels::cpu {
namespace {

using namespace packed;

// Codes of a tile, as integers of `Bits` bits, in words.
template <int Bits>
TORCHKV_CLONES void pack_words(
    const uint32_t* codes,
    int64_t size,
    uint32_t* words) {
  const int64_t count = (size + 32 / Bits - 1) / (32 / Bits);
  std::memset(words, 0, count * sizeof(uint32_t));
  uint32_t shift = 0;
  for (int64_t begin = 0; begin < size; begin += count, shift += Bits) {
    const int64_t line = std::min(count, size - begin);
    for (int64_t i = 0; i < line; ++i) {
      words[i] |= codes[begin + i] << shift;
    }
  }
}

// Of each codec, the codes of what is sent.

template <typename T>
TORCHKV_CLONES void code_1bit(const T* sent, int64_t size, uint32_t* codes) {
  for (int64_t i = 0; i < size; ++i) {
    codes[i] = codecs::code_1bit(sent[i]);
  }
}

template <typename T>
TORCHKV_CLONES void code_2bit(const T* sent, int64_t size, uint32_t* codes) {
  for (int64_t i = 0; i < size; ++i) {
    codes[i] = codecs::code_2bit(sent[i]);
  }
}

template <typename T>
TORCHKV_CLONES void code_int4(
    const T* sent,
    T inverse,
    int64_t size,
    uint32_t* codes) {
  for (int64_t i = 0; i < size; ++i) {
    codes[i] = codecs::code_int4(sent[i], inverse);
  }
}

template <typename T>
TORCHKV_CLONES void code_fp8(
    const T* sent,
    T inverse,
    int64_t size,
    uint32_t* codes) {
  for (int64_t i = 0; i < size; ++i) {
    codes[i] = codecs::code_fp8(sent[i], inverse);
  }
}

float most_of(Id id) {
  return id == Id::kFp8 ? codecs::kFp8Max : codecs::kInt4Max;
}

// Elements that are looked at together, because most of them are not sent.
constexpr int64_t kLine = 32;

// Whether not all are 0; a zero with a sign is sent.
template <typename T>
bool any_sent(const T* sent, int64_t begin, int64_t end) {
  codecs::bits_t<T> any = 0;
  for (int64_t i = begin; i < end; ++i) {
    codecs::bits_t<T> bits;
    std::memcpy(&bits, sent + i, sizeof(bits));
    any |= bits;
  }
  return any != 0;
}

// Packs the tiles of one source.
template <typename T>
class Packer {
 public:
  Packer(const CompressedSource& source, int64_t begin, int64_t num_elements)
      : source_(source), begin_(begin), num_elements_(num_elements) {}

  void pack(c10::function_ref<char*(int64_t)> allocate) {
    if (source_.codec.id == Id::kTopK) {
      pack_top(allocate);
      return;
    }
    const Codec& codec = source_.codec;
    const int64_t block_size = codec.block_size();
    const int64_t block_begin = block_size == 0 ? 0 : begin_ % block_size;
    const int64_t blocks = num_blocks(block_begin, num_elements_, block_size);
    const int64_t size_of_scales = blocks * static_cast<int64_t>(sizeof(T));
    char* const data = allocate(
        kHeaderSize + size_of_scales + bytes_of_codes(codec.id, num_elements_));
    write_header(data, block_begin, 0);
    char* const scales = data + kHeaderSize;
    for (int64_t i = 0; i < blocks; ++i) {
      set_number(scales, i, scale_at(begin_ / block_size + i).scale);
    }
    char* const codes = scales + size_of_scales;
    for_each_tile([&](int64_t first, int64_t size, const T* sent) {
      pack_tile(sent, first, size, codes);
    });
  }

 private:
  struct Top {
    std::vector<T> numbers;
    std::vector<uint16_t> indices;
  };

  void write_header(char* data, int64_t block_begin, int64_t num_sent) const {
    Header header;
    header.codec = static_cast<uint8_t>(source_.codec.id);
    header.size = sizeof(T);
    header.block_begin = static_cast<uint32_t>(block_begin);
    header.num_elements = num_elements_;
    header.num_sent = num_sent;
    header.threshold = source_.codec.threshold;
    std::memcpy(data, &header, sizeof(header));
  }

  codecs::Scale<T> scale_at(int64_t block) const { // of the value
    return codecs::scale_of(
        number_at<T>(source_.largest, block), most_of(source_.codec.id));
  }

  // Calls `visit(first, size, sent)` for each tile, in parallel.
  template <class Visit>
  void for_each_tile(Visit visit) const {
    const auto stride = static_cast<int64_t>(c10::elementSize(source_.dtype));
    Chunks tiles(kTile);
    tiles.add_job(num_elements_, stride + 2 * static_cast<int64_t>(sizeof(T)));
    tiles.for_each(
        [&](int64_t /*job*/, int64_t /*chunk*/, int64_t first, int64_t size) {
          alignas(kCacheLine) T buffer[kTile];
          alignas(kCacheLine) T sent[kTile];
          T* const residual = source_.residual == nullptr
              ? nullptr
              : reinterpret_cast<T*>(source_.residual) + first;
          const char* const data = source_.data + first * stride;
          add_sent<T>(
              source_,
              {data, residual, residual, buffer, sent, /*is_add=*/false, size},
              begin_ + first);
          visit(first, size, sent);
        });
  }

  void pack_tile(const T* sent, int64_t first, int64_t size, char* all) const {
    const Id id = source_.codec.id;
    char* const codes = all + bytes_of_codes(id, first);
    if (id == Id::kFp16 || id == Id::kBf16) {
      access<T>(half_type(id)).store(sent, codes, 2, size);
      return;
    }
    alignas(kCacheLine) uint32_t numbers[kTile];
    alignas(kCacheLine) uint32_t words[kTile];
    if (id == Id::k1Bit) {
      code_1bit(sent, size, numbers);
      pack_words<1>(numbers, size, words);
    } else if (id == Id::k2Bit) {
      code_2bit(sent, size, numbers);
      pack_words<2>(numbers, size, words);
    } else {
      for_each_scale(
          begin_ + first,
          size,
          source_.codec.block_size(),
          [&](int64_t i, int64_t count, int64_t block) {
            const T inverse = scale_at(block).inverse;
            if (id == Id::kFp8) {
              code_fp8(sent + i, inverse, count, numbers + i);
            } else {
              code_int4(sent + i, inverse, count, numbers + i);
            }
          });
      if (id == Id::kFp8) {
        std::copy(numbers, numbers + size, codes);
        return;
      }
      pack_words<4>(numbers, size, words);
    }
    std::memcpy(codes, words, bytes_of_codes(id, size));
  }

  // Only afterwards is it known how much is sent.
  void pack_top(c10::function_ref<char*(int64_t)> allocate) const {
    std::vector<Top> tops(static_cast<size_t>(num_tiles(num_elements_)));
    for_each_tile([&](int64_t first, int64_t size, const T* sent) {
      Top& top = tops[static_cast<size_t>(first / kTile)];
      for (int64_t begin = 0; begin < size; begin += kLine) {
        const int64_t end = std::min(begin + kLine, size);
        for (int64_t i = any_sent(sent, begin, end) ? begin : end; i < end;
             ++i) {
          if (any_sent(sent, i, i + 1)) {
            top.numbers.push_back(sent[i]);
            top.indices.push_back(static_cast<uint16_t>(i));
          }
        }
      }
    });
    int64_t num_sent = 0;
    for (const Top& top : tops) {
      num_sent += static_cast<int64_t>(top.numbers.size());
    }
    const auto num_tops = static_cast<int64_t>(tops.size());
    char* const data = allocate(
        kHeaderSize + 8 * num_tops +
        num_sent * static_cast<int64_t>(sizeof(T) + sizeof(uint16_t)));
    write_header(data, 0, num_sent);
    char* const ends = data + kHeaderSize;
    char* number = ends + 8 * num_tops;
    char* index = number + num_sent * static_cast<int64_t>(sizeof(T));
    int64_t end = 0;
    for (int64_t i = 0; i < num_tops; ++i) {
      const Top& top = tops[static_cast<size_t>(i)];
      const size_t count = top.numbers.size();
      end += static_cast<int64_t>(count);
      set_number(ends, i, end);
      if (count != 0) {
        std::memcpy(number, top.numbers.data(), count * sizeof(T));
        std::memcpy(index, top.indices.data(), count * sizeof(uint16_t));
      }
      number += count * sizeof(T);
      index += count * sizeof(uint16_t);
    }
  }

  const CompressedSource& source_;
  const int64_t begin_;
  const int64_t num_elements_;
};

} // namespace

void pack_codes(
    const CompressedSource& source,
    int64_t begin,
    int64_t num_elements,
    c10::ScalarType dtype,
    c10::function_ref<char*(int64_t num_bytes)> allocate) {
  if (dtype == c10::kDouble) {
    Packer<double>(source, begin, num_elements).pack(allocate);
  } else {
    Packer<float>(source, begin, num_elements).pack(allocate);
  }
}

} // namespace torchkv::kernels::cpu

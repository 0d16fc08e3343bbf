#include "compressed_tile.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../../core/errors.h"
#include "../../core/mixed_bits.h"
#include "../codecs.h"
#include "cache_line.h"
#include "chunks.h"
#include "clones.h"

namespace torchkv::kernels::cpu {
namespace {

using Id = Codec::Id;

// What each codec sends of a number, which is element `i` of a tile.

template <typename T>
struct OneBit {
  T threshold;
  TORCHKV_CODEC T operator()(T value, int64_t /*i*/) const {
    return codecs::sent_1bit(value, threshold);
  }
};
template <typename T>
struct TwoBit {
  T threshold;
  TORCHKV_CODEC T operator()(T value, int64_t /*i*/) const {
    return codecs::sent_2bit(value, threshold);
  }
};
template <typename T>
struct Fp16 {
  TORCHKV_CODEC T operator()(T value, int64_t /*i*/) const {
    return codecs::sent_fp16(value);
  }
};
template <typename T>
struct Bf16 {
  TORCHKV_CODEC T operator()(T value, int64_t /*i*/) const {
    return codecs::sent_bf16(value);
  }
};
template <typename T>
struct Fp8 {
  codecs::Scale<T> scale;
  TORCHKV_CODEC T operator()(T value, int64_t /*i*/) const {
    return codecs::sent_fp8(value, scale);
  }
};
template <bool kFinite, typename T>
struct Int4 {
  codecs::Scale<T> scale;
  uint32_t stream; // of the block
  TORCHKV_CODEC T operator()(T value, int32_t i) const {
    const float random =
        codecs::random_from_8(stream + static_cast<uint32_t>(i));
    return kFinite ? codecs::sent_int4_of_finite(value, scale, random)
                   : codecs::sent_int4(value, scale, random);
  }
};
template <typename T>
struct TopK {
  codecs::bits_t<T> least;
  int64_t ties_end; // of the tile: ties before it are sent
  TORCHKV_CODEC T operator()(T value, int64_t i) const {
    return codecs::sent_topk(value, least, i, ties_end);
  }
};

template <class Code, typename T>
constexpr bool kIsMxnet =
    std::is_same_v<Code, OneBit<T>> || std::is_same_v<Code, TwoBit<T>>;

// Adds what a codec sends to the total, or makes it the total. The numbers are
// values + residuals or, without kSum, the values.
template <bool kAdd, bool kSum, class Code, typename T>
TORCHKV_CLONES void send(
    Code code,
    const T* values,
    const T* residuals,
    T* kept,
    T* total,
    int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const T value = kSum ? values[i] + residuals[i] : values[i];
    const T sent = code(value, i);
    // As MXNet: a number that is not finite stays.
    kept[i] =
        kIsMxnet<Code, T> ? value - sent : codecs::residual_of(value, sent);
    total[i] = kAdd ? total[i] + sent : sent;
  }
}

// The same of a codec without error feedback.
template <bool kAdd, class Code, typename T>
TORCHKV_CLONES void send_once(
    Code code,
    const T* values,
    T* total,
    int32_t size) { // indices of 32 bits take fewer vector operations
  for (int32_t i = 0; i < size; ++i) {
    const T sent = code(values[i], i);
    total[i] = kAdd ? total[i] + sent : sent;
  }
}

// The greatest magnitude of a block of values; infinity or NaN if there is any.
template <typename T>
TORCHKV_CLONES T largest_of_all(const T* values, int64_t size) {
  codecs::bits_t<T> largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    largest = std::max(largest, codecs::magnitude_bits(values[i]));
  }
  return codecs::from_bits<T>(largest);
}

template <typename T>
TORCHKV_CLONES T largest_of_finite(const T* values, int64_t size) {
  codecs::bits_t<T> largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    const T finite =
        codecs::either(codecs::is_finite(values[i]), values[i], T(0));
    largest = std::max(largest, codecs::magnitude_bits(finite));
  }
  return codecs::from_bits<T>(largest);
}

template <typename T>
struct Magnitude {
  T largest; // of the finite values
  bool is_finite; // all values are
};
template <typename T>
Magnitude<T> magnitude_of(const T* values, int64_t size) {
  const T largest = largest_of_all(values, size);
  return codecs::is_finite(largest)
      ? Magnitude<T>{largest, true}
      : Magnitude<T>{largest_of_finite(values, size), false};
}

// Sends the values of whole blocks, the first of which has number `block`, by
// int4, up to the first block that has a value that is not finite; returns how
// many it has sent. One function, because blocks are short: calls, and waiting
// for the scale, would take as long as the rest.
constexpr int64_t kInt4Block = Codec{Id::kInt4}.block_size();
template <bool kAdd, typename T>
TORCHKV_CLONES int64_t send_finite_blocks(
    const T* values,
    uint64_t stream,
    int64_t block,
    T* total,
    int64_t num_blocks) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    codecs::bits_t<T> largest = 0;
    for (int32_t i = 0; i < kInt4Block; ++i) {
      largest = std::max(largest, codecs::magnitude_bits(values[i]));
    }
    const T magnitude = codecs::from_bits<T>(largest);
    if (!codecs::is_finite(magnitude)) {
      return b;
    }
    const uint64_t bits = mixed_bits(stream + static_cast<uint64_t>(block + b));
    const Int4<true, T> code{
        codecs::scale_of(magnitude, codecs::kInt4Max),
        static_cast<uint32_t>(bits)};
    for (int32_t i = 0; i < kInt4Block; ++i) {
      const T sent = code(values[i], i);
      total[i] = kAdd ? total[i] + sent : sent;
    }
    values += kInt4Block;
    total += kInt4Block;
  }
  return num_blocks;
}

// Calls `visit(i, size, block, index, scale, is_finite)` for the blocks in a
// tile: `size` elements from element `i` of the tile and `index` of the block
// on, which are known to be finite or not.
template <typename T, class Visit>
void for_each_block(
    const T* values,
    int64_t num_elements,
    int64_t first, // element of the value
    const char* largest, // of the value's blocks, or null
    int64_t block_size,
    float most,
    Visit visit) {
  for (int64_t i = 0; i < num_elements;) {
    const int64_t block = (first + i) / block_size;
    const int64_t index = (first + i) % block_size;
    const int64_t size = std::min(block_size - index, num_elements - i);
    const Magnitude<T> magnitude = largest == nullptr
        ? magnitude_of(values + i, size)
        : Magnitude<T>{reinterpret_cast<const T*>(largest)[block], false};
    visit(
        i,
        size,
        block,
        index,
        codecs::scale_of(magnitude.largest, most),
        magnitude.is_finite);
    i += size;
  }
}

// The elements of a loaded tile from `i` on.
template <typename T>
CompressedTile<T> tile_from(
    const CompressedTile<T>& tile,
    int64_t i,
    int64_t size) {
  CompressedTile<T> part = tile;
  part.residual += i;
  part.kept += i;
  part.buffer += i;
  part.total += i;
  part.size = size;
  return part;
}

// The values plus residuals, in the buffer.
template <typename T>
const T* load_tile(const CompressedTile<T>& tile, c10::ScalarType dtype) {
  load_sum<T>(tile.data, dtype, tile.residual, tile.buffer, tile.size);
  return tile.buffer;
}

template <class Code, typename T>
void add_loaded(const CompressedTile<T>& tile, Code code, const T* values) {
  const auto send_all =
      tile.is_add ? &send<true, false, Code, T> : &send<false, false, Code, T>;
  send_all(code, values, tile.residual, tile.kept, tile.total, tile.size);
}

template <class Code, typename T>
void add_once(bool is_add, Code code, const T* values, T* total, int64_t size) {
  const auto send_all =
      is_add ? &send_once<true, Code, T> : &send_once<false, Code, T>;
  send_all(code, values, total, static_cast<int32_t>(size));
}

// Whether the values can be read where they are.
template <typename T>
bool in_place(const CompressedTile<T>& tile, c10::ScalarType dtype) {
  return dtype == c10::CppTypeToScalarType<T>::value &&
      reinterpret_cast<uintptr_t>(tile.data) % alignof(T) == 0;
}

template <class Code, typename T>
void add(const CompressedTile<T>& tile, Code code, c10::ScalarType dtype) {
  if (!in_place(tile, dtype)) {
    add_loaded(tile, code, load_tile(tile, dtype));
    return;
  }
  const auto send_all =
      tile.is_add ? &send<true, true, Code, T> : &send<false, true, Code, T>;
  const auto* const values = reinterpret_cast<const T*>(tile.data);
  send_all(code, values, tile.residual, tile.kept, tile.total, tile.size);
}

} // namespace

template <typename T>
void add_sent(
    const CompressedSource& source,
    const CompressedTile<T>& tile,
    int64_t index) {
  const Codec& codec = source.codec;
  const auto threshold = static_cast<T>(codec.threshold);
  switch (codec.id) {
    case Id::k1Bit:
      return add(tile, OneBit<T>{threshold}, source.dtype);
    case Id::k2Bit:
      return add(tile, TwoBit<T>{threshold}, source.dtype);
    case Id::kFp16:
      return add(tile, Fp16<T>{}, source.dtype);
    case Id::kBf16:
      return add(tile, Bf16<T>{}, source.dtype);
    case Id::kTopK:
      return add(
          tile,
          TopK<T>{
              static_cast<codecs::bits_t<T>>(source.least_bits),
              source.ties_end - index},
          source.dtype);
    case Id::kFp8: {
      const T* const values = load_tile(tile, source.dtype);
      return for_each_block(
          values,
          tile.size,
          index,
          source.largest,
          codec.block_size(),
          codecs::kFp8Max,
          [&](int64_t i,
              int64_t size,
              int64_t /*block*/,
              int64_t /*begin*/,
              codecs::Scale<T> scale,
              bool /*is_finite*/) {
            add_loaded(tile_from(tile, i, size), Fp8<T>{scale}, values + i);
          });
    }
    case Id::kInt4: {
      const T* const values = in_place(tile, source.dtype)
          ? reinterpret_cast<const T*>(tile.data)
          : load_tile(tile, source.dtype);
      int64_t done = 0; // elements
      if (source.largest == nullptr && index % kInt4Block == 0) {
        const auto send_all = tile.is_add ? &send_finite_blocks<true, T>
                                          : &send_finite_blocks<false, T>;
        const int64_t count = tile.size / kInt4Block;
        const int64_t block = index / kInt4Block;
        done = kInt4Block *
            send_all(values, source.stream, block, tile.total, count);
      }
      const T* const rest = values + done;
      T* const total = tile.total + done;
      return for_each_block(
          rest,
          tile.size - done,
          index + done,
          source.largest,
          kInt4Block,
          codecs::kInt4Max,
          [&](int64_t i,
              int64_t size,
              int64_t block,
              int64_t begin,
              codecs::Scale<T> scale,
              bool is_finite) {
            const uint64_t bits =
                mixed_bits(source.stream + static_cast<uint64_t>(block));
            const auto stream =
                static_cast<uint32_t>(bits) + static_cast<uint32_t>(begin);
            const auto add_all = [&](auto code) {
              add_once(tile.is_add, code, rest + i, total + i, size);
            };
            if (is_finite) {
              add_all(Int4<true, T>{scale, stream});
            } else {
              add_all(Int4<false, T>{scale, stream});
            }
          });
    }
    case Id::kNone:
      break;
  }
}

template void add_sent<float>(
    const CompressedSource& source,
    const CompressedTile<float>& tile,
    int64_t index);
template void add_sent<double>(
    const CompressedSource& source,
    const CompressedTile<double>& tile,
    int64_t index);

void block_magnitudes(
    const char* value,
    c10::ScalarType dtype,
    const char* residual,
    c10::ScalarType residual_dtype,
    int64_t num_elements,
    int64_t block_size,
    char* largest) {
  const auto value_size = static_cast<int64_t>(c10::elementSize(dtype));
  const auto find = [&](auto zero) {
    using T = decltype(zero);
    TORCHKV_INTERNAL_ASSERT(block_size <= kTile);
    Chunks blocks(block_size);
    blocks.add_job(num_elements, value_size + static_cast<int64_t>(sizeof(T)));
    blocks.for_each(
        [&](int64_t /*job*/, int64_t block, int64_t first, int64_t size) {
          alignas(kCacheLine) T sum[kTile];
          const auto* const all = reinterpret_cast<const T*>(residual);
          load_sum<T>(
              value + first * value_size,
              dtype,
              all == nullptr ? nullptr : all + first,
              sum,
              size);
          reinterpret_cast<T*>(largest)[block] =
              magnitude_of(sum, size).largest;
        });
  };
  if (residual_dtype == c10::kDouble) {
    find(double());
  } else {
    find(float());
  }
}

} // namespace torchkv::kernels::cpu

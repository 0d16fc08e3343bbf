#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../../core/codec.h"
#include "../codes.h"
#include "params.h"
#include "types.h"

// The codes that kernels send, in memory. Of each kSendChunk elements of a
// value, in the order of memory:
//
//   scales  of the type of the arithmetic, one for each of the codec's blocks;
//           up to a multiple of 16 bytes
//   codes   a word for each kSendPack elements, from the low bits on:
//           1bit, 2bit  8 bits
//           int4        16 bits
//           fp8         32 bits
//           fp16, bf16  64 bits: the numbers
//
// The last chunk is a whole one, too. So part of a value is part of its codes.
// They do not leave the process: for other machines, kernels/cpu/packed_codes.h
// has 1bit in half as many bits.
namespace torchkv::kernels::cuda {

// A thread has this many consecutive elements.
constexpr int kSendPack = 4;
static_assert(int64_t{kThreads} * kSendPack == kSendChunk);

constexpr int bits_of_code(Codec::Id codec) {
  switch (codec) {
    case Codec::Id::k1Bit:
    case Codec::Id::k2Bit:
      return 2;
    case Codec::Id::kInt4:
      return 4;
    case Codec::Id::kFp8:
      return 8;
    default:
      return 16;
  }
}

// `size` is that of the arithmetic's type.
constexpr int64_t bytes_of_scales(Codec::Id codec, int64_t size) {
  const int64_t block = Codec{codec}.block_size();
  const int64_t bytes = block == 0 ? 0 : kSendChunk / block * size;
  return (bytes + kWord - 1) / kWord * kWord;
}
constexpr int64_t bytes_of_chunk(Codec::Id codec, int64_t size) {
  return bytes_of_scales(codec, size) + kSendChunk * bits_of_code(codec) / 8;
}

constexpr int64_t bytes_of_codes(
    Codec::Id codec,
    int64_t size,
    int64_t num_elements) {
  return (num_elements + kSendChunk - 1) / kSendChunk *
      bytes_of_chunk(codec, size);
}

// T is the arithmetic's type.
template <typename T, Codec::Id kCodec>
class CodeChunk {
 public:
  static constexpr int kBits = bits_of_code(kCodec);
  // Elements with one scale; 0 where there is none.
  static constexpr auto kBlock =
      static_cast<uint32_t>(Codec{kCodec}.block_size());
  // The codes of a thread's elements.
  using word_t = std::conditional_t<
      kBits == 2,
      uint8_t,
      std::conditional_t<
          kBits == 4,
          uint16_t,
          std::conditional_t<kBits == 8, uint32_t, uint64_t>>>;
  static_assert(sizeof(word_t) * 8 == size_t{kBits} * kSendPack);
  using half_t = std::conditional_t<kCodec == Codec::Id::kFp16, Half, BFloat16>;

  TORCHKV_HOST_DEVICE static inline T* scales(void* codes, int64_t chunk) {
    return reinterpret_cast<T*>(static_cast<char*>(codes) + chunk * kBytes);
  }
  TORCHKV_HOST_DEVICE static inline const T* scales(
      const void* codes,
      int64_t chunk) {
    return reinterpret_cast<const T*>(
        static_cast<const char*>(codes) + chunk * kBytes);
  }
  TORCHKV_HOST_DEVICE static inline word_t* words(void* codes, int64_t chunk) {
    return reinterpret_cast<word_t*>(
        static_cast<char*>(codes) + chunk * kBytes + kBytesOfScales);
  }
  TORCHKV_HOST_DEVICE static inline const word_t* words(
      const void* codes,
      int64_t chunk) {
    return reinterpret_cast<const word_t*>(
        static_cast<const char*>(codes) + chunk * kBytes + kBytesOfScales);
  }

  // The code of what is sent; `inverse` of its block's scale.
  TORCHKV_HOST_DEVICE static inline word_t code_of(T sent, T inverse) {
    if constexpr (kCodec == Codec::Id::k1Bit) {
      return static_cast<word_t>(codecs::code_1bit(sent));
    } else if constexpr (kCodec == Codec::Id::k2Bit) {
      return static_cast<word_t>(codecs::code_2bit(sent));
    } else if constexpr (kCodec == Codec::Id::kInt4) {
      return static_cast<word_t>(codecs::code_int4(sent, inverse));
    } else if constexpr (kCodec == Codec::Id::kFp8) {
      return codecs::code_fp8(sent, inverse);
    } else {
      const auto half = narrow<half_t>(static_cast<float>(sent));
      uint16_t bits;
      std::memcpy(&bits, &half, sizeof(bits));
      return bits;
    }
  }
  // And back.
  TORCHKV_HOST_DEVICE static inline T number_of(
      uint32_t code,
      T scale,
      T threshold) {
    if constexpr (kCodec == Codec::Id::k1Bit) {
      return codecs::number_1bit<T>(code);
    } else if constexpr (kCodec == Codec::Id::k2Bit) {
      return codecs::number_2bit(code, threshold);
    } else if constexpr (kCodec == Codec::Id::kInt4) {
      return codecs::number_int4(code, scale);
    } else if constexpr (kCodec == Codec::Id::kFp8) {
      return codecs::number_fp8(code, scale);
    } else {
      const auto bits = static_cast<uint16_t>(code);
      half_t half;
      std::memcpy(&half, &bits, sizeof(bits));
      return T(widen(half));
    }
  }

 private:
  static constexpr int64_t kBytes = bytes_of_chunk(kCodec, sizeof(T));
  static constexpr int64_t kBytesOfScales = bytes_of_scales(kCodec, sizeof(T));
};

// Calls `f` with the codec as a std::integral_constant, and returns whether it
// has such codes.
template <typename F>
bool dispatch_codec(Codec::Id codec, F f) {
  const auto call = [&](auto known) {
    if (codec != decltype(known)::value) {
      return false;
    }
    f(known);
    return true;
  };
  using Id = Codec::Id;
  return call(std::integral_constant<Id, Id::k1Bit>()) ||
      call(std::integral_constant<Id, Id::k2Bit>()) ||
      call(std::integral_constant<Id, Id::kFp16>()) ||
      call(std::integral_constant<Id, Id::kBf16>()) ||
      call(std::integral_constant<Id, Id::kFp8>()) ||
      call(std::integral_constant<Id, Id::kInt4>());
}

// A thread's elements among those of a call, some of which may be before or
// behind them.
struct SendRange {
  int64_t first; // among the call's elements
  int64_t num_elements;
  bool is_whole; // all of them are, and memory is aligned

  TORCHKV_HOST_DEVICE SendRange(
      int64_t first_,
      int64_t num_elements_,
      bool is_aligned)
      : first(first_),
        num_elements(num_elements_),
        is_whole(
            is_aligned && first >= 0 && first + kSendPack <= num_elements) {}

  // Other elements are zeros.
  template <bool kStreams, typename T>
  TORCHKV_HOST_DEVICE inline void load(
      const T* source,
      Pack<T, kSendPack>& pack) const {
    if (is_whole) {
      pack = cuda::load<kStreams, T, kSendPack>(source + first);
      return;
    }
    TORCHKV_UNROLL
    for (int i = 0; i < kSendPack; ++i) {
      pack.at[i] = has(i) ? source[first + i] : narrow<T>(0);
    }
  }
  // Values of type V, with their residuals, or without where null.
  template <bool kStreams, typename V>
  TORCHKV_HOST_DEVICE inline void load_sum(
      const void* values,
      const void* residuals,
      Pack<arithmetic_t<V>, kSendPack>& sum) const {
    Pack<V, kSendPack> given;
    load<kStreams>(static_cast<const V*>(values), given);
    TORCHKV_UNROLL
    for (int i = 0; i < kSendPack; ++i) {
      sum.at[i] = widen(given.at[i]);
    }
    if (residuals != nullptr) {
      Pack<arithmetic_t<V>, kSendPack> residual;
      load<kStreams>(static_cast<const arithmetic_t<V>*>(residuals), residual);
      TORCHKV_UNROLL
      for (int i = 0; i < kSendPack; ++i) {
        sum.at[i] = sum.at[i] + residual.at[i];
      }
    }
  }
  template <bool kStreams, typename T>
  TORCHKV_HOST_DEVICE inline void store(
      const Pack<T, kSendPack>& pack,
      T* destination) const {
    if (is_whole) {
      cuda::store<kStreams>(pack, destination + first);
      return;
    }
    TORCHKV_UNROLL
    for (int i = 0; i < kSendPack; ++i) {
      if (has(i)) {
        destination[first + i] = pack.at[i];
      }
    }
  }

 private:
  TORCHKV_HOST_DEVICE inline bool has(int i) const {
    return first + i >= 0 && first + i < num_elements;
  }
};

} // namespace torchkv::kernels::cuda

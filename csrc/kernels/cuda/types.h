#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#endif

#include "../rules.h"

#ifdef __CUDA_ARCH__
#define TORCHKV_UNROLL _Pragma("unroll")
#define TORCHKV_NO_UNROLL _Pragma("unroll 1")
#else
#define TORCHKV_UNROLL
#define TORCHKV_NO_UNROLL
#endif

// The types of elements and of the arithmetic on them; vectorized loads and
// stores.
namespace torchkv::kernels::cuda {

// Half precision, with the same bits on GPUs and on the host, except for the
// payload of a NaN.
#ifdef __CUDACC__
using Half = __half;
using BFloat16 = __nv_bfloat16;

__host__ __device__ inline float to_float(Half number) {
  return __half2float(number);
}
__host__ __device__ inline float to_float(BFloat16 number) {
  return __bfloat162float(number);
}
__host__ __device__ inline void round_to(Half& result, float number) {
  result = __float2half_rn(number);
}
__host__ __device__ inline void round_to(BFloat16& result, float number) {
  result = __float2bfloat16_rn(number);
}
#else
using Half = c10::Half;
using BFloat16 = c10::BFloat16;

template <typename T>
float to_float(T number) {
  return number;
}
template <typename T>
void round_to(T& result, float number) {
  result = number;
}
#endif

// A byte that is true if it is not 0.
enum class Bool : uint8_t {};

template <typename T>
struct Arithmetic {
  using type = T;
};
template <>
struct Arithmetic<Half> {
  using type = float;
};
template <>
struct Arithmetic<BFloat16> {
  using type = float;
};
// The type in which values of type T are added.
template <typename T>
using arithmetic_t = typename Arithmetic<T>::type;

template <typename T>
TORCHKV_HOST_DEVICE inline arithmetic_t<T> widen(T number) {
  if constexpr (std::is_same_v<T, arithmetic_t<T>>) {
    return number;
  } else {
    return to_float(number);
  }
}

template <typename T>
TORCHKV_HOST_DEVICE inline T narrow(arithmetic_t<T> number) {
  if constexpr (std::is_same_v<T, Bool>) {
    return static_cast<Bool>(number != Bool());
  } else if constexpr (std::is_same_v<T, arithmetic_t<T>>) {
    return number;
  } else {
    T result;
    round_to(result, number);
    return result;
  }
}

template <typename T>
TORCHKV_HOST_DEVICE inline T add(T a, T b) {
  if constexpr (std::is_same_v<T, Bool>) {
    // Like torch.add.
    return static_cast<Bool>(static_cast<uint8_t>(a) | static_cast<uint8_t>(b));
  } else {
    return static_cast<T>(a + b);
  }
}

// The neutral element of addition.
template <typename T>
TORCHKV_HOST_DEVICE inline T nothing() {
  if constexpr (std::is_floating_point_v<T>) {
    return -T(0); // + -0.0 is -0.0, and 0.0 + -0.0 is not
  } else {
    return T();
  }
}

constexpr int kWord = 16; // bytes, of the widest access

// Consecutive elements that one thread loads or stores together.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize < kWord ? sizeof(T) * kSize : kWord) Pack {
  T at[kSize];
};

#ifdef __CUDA_ARCH__
template <size_t kBytes>
using word_of = std::conditional_t<kBytes % kWord == 0, uint4, uint2>;

// In PTX, because the compiler splits a plain assignment into elements.
__device__ inline void store_word(uint4* destination, uint4 word) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(destination),
               "r"(word.x),
               "r"(word.y),
               "r"(word.z),
               "r"(word.w)
               : "memory");
}
__device__ inline void store_word(uint2* destination, uint2 word) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(destination),
               "r"(word.x),
               "r"(word.y)
               : "memory");
}
#endif

// If it streams, of data that is not read again soon: evicted from the caches
// first.
template <bool kStreams, typename T, int kSize>
TORCHKV_HOST_DEVICE inline void store(
    const Pack<T, kSize>& pack,
    T* destination) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(pack) % 8 == 0) {
    using word_t = word_of<sizeof(pack)>;
    word_t words[sizeof(pack) / sizeof(word_t)];
    memcpy(words, &pack, sizeof(pack));
    TORCHKV_UNROLL
    for (size_t i = 0; i < sizeof(pack) / sizeof(word_t); ++i) {
      word_t* const to = reinterpret_cast<word_t*>(destination) + i;
      if constexpr (kStreams) {
        __stcs(to, words[i]);
      } else {
        store_word(to, words[i]);
      }
    }
    return;
  }
#endif
  *reinterpret_cast<Pack<T, kSize>*>(destination) = pack;
}

// If it streams, as store().
template <bool kStreams, typename T, int kSize>
TORCHKV_HOST_DEVICE inline Pack<T, kSize> load(const T* source) {
#ifdef __CUDA_ARCH__
  if constexpr (kStreams && sizeof(T) * kSize % 8 == 0) {
    Pack<T, kSize> result;
    using word_t = word_of<sizeof(result)>;
    word_t words[sizeof(result) / sizeof(word_t)];
    TORCHKV_UNROLL
    for (size_t i = 0; i < sizeof(result) / sizeof(word_t); ++i) {
      words[i] = __ldcs(reinterpret_cast<const word_t*>(source) + i);
    }
    memcpy(&result, words, sizeof(result));
    return result;
  }
#endif
  return *reinterpret_cast<const Pack<T, kSize>*>(source);
}

} // namespace torchkv::kernels::cuda

#include "access.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <c10/util/TypeCast.h>
#include <c10/util/complex.h>

#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "clones.h"
#include "half_precision.h"

namespace torchkv::kernels::cpu {
namespace {

// Contiguous half precision has specialized kernels.

template <bool kAdd>
TORCHKV_CLONES void load_bfloat16(
    const char* source,
    float* total,
    int64_t num_elements) {
  for (int64_t i = 0; i < num_elements; ++i) {
    const float value = read_bfloat16(source + 2 * i);
    total[i] = kAdd ? total[i] + value : value;
  }
}

TORCHKV_CLONES void store_bfloat16(
    const float* total,
    char* result,
    int64_t num_elements) {
  for (int64_t i = 0; i < num_elements; ++i) {
    write_bfloat16(total[i], result + 2 * i);
  }
}

void load_half_one_by_one(
    const char* source,
    bool is_add,
    float* total,
    int64_t num_elements) {
  for (int64_t i = 0; i < num_elements; ++i) {
    const float value = read_half(source + 2 * i);
    total[i] = is_add ? total[i] + value : value;
  }
}

void store_half_one_by_one(
    const float* total,
    char* result,
    int64_t num_elements) {
  for (int64_t i = 0; i < num_elements; ++i) {
    write_half(total[i], result + 2 * i);
  }
}

#if TORCHKV_HAS_F16C
TORCHKV_F16C void load_half(
    const char* source,
    bool is_add,
    float* total,
    int64_t num_elements) {
  int64_t i = 0;
  for (; i + 8 <= num_elements; i += 8) {
    const __m128i half =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 2 * i));
    __m256 value = _mm256_cvtph_ps(half);
    if (is_add) {
      value = _mm256_add_ps(_mm256_loadu_ps(total + i), value);
    }
    _mm256_storeu_ps(total + i, value);
  }
  load_half_one_by_one(source + 2 * i, is_add, total + i, num_elements - i);
}

TORCHKV_F16C void store_half(
    const float* total,
    char* result,
    int64_t num_elements) {
  int64_t i = 0;
  for (; i + 8 <= num_elements; i += 8) {
    const __m128i half =
        _mm256_cvtps_ph(_mm256_loadu_ps(total + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(result + 2 * i), half);
  }
  store_half_one_by_one(total + i, result + 2 * i, num_elements - i);
}
#endif

#ifndef TORCHKV_ONLY_F16C
TORCHKV_F16C_DEFAULT void load_half(
    const char* source,
    bool is_add,
    float* total,
    int64_t num_elements) {
  load_half_one_by_one(source, is_add, total, num_elements);
}

TORCHKV_F16C_DEFAULT void store_half(
    const float* total,
    char* result,
    int64_t num_elements) {
  store_half_one_by_one(total, result, num_elements);
}
#endif

template <typename acc_t, typename T>
constexpr bool kIsHalfPrecision = std::is_same_v<acc_t, float> &&
    (std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>);

template <typename acc_t>
acc_t add(acc_t a, acc_t b) {
  if constexpr (std::is_same_v<acc_t, bool>) {
    return a || b; // as torch.add
  } else if constexpr (std::is_integral_v<acc_t>) {
    using unsigned_t = std::make_unsigned_t<acc_t>;
    return static_cast<acc_t>(
        static_cast<unsigned_t>(a) + static_cast<unsigned_t>(b));
  } else {
    return a + b;
  }
}

template <typename T>
T read(const char* address) {
  T value;
  if constexpr (std::is_same_v<T, bool>) {
    value = *address != 0; // a C++ bool may only be 0 or 1
  } else {
    std::memcpy(&value, address, sizeof(T));
  }
  return value;
}

// total = or += `num_elements` numbers of type T.
template <typename acc_t, typename T>
void load(
    const char* source,
    int64_t stride,
    bool is_add,
    void* result,
    int64_t num_elements) {
  auto* const total = static_cast<acc_t*>(result);
  constexpr auto kDense = static_cast<int64_t>(sizeof(T));
  if constexpr (kIsHalfPrecision<acc_t, T>) {
    if (stride == kDense) {
      if constexpr (std::is_same_v<T, c10::Half>) {
        load_half(source, is_add, total, num_elements);
      } else {
        (is_add ? &load_bfloat16<true>
                : &load_bfloat16<false>)(source, total, num_elements);
      }
      return;
    }
  }
  // Separate loops for dense and repeated numbers, which the compiler
  // vectorizes.
  const auto each = [&](auto combine) {
    if (stride == 0) {
      const auto value = c10::convert<acc_t>(read<T>(source));
      for (int64_t i = 0; i < num_elements; ++i) {
        combine(total[i], value);
      }
    } else if (stride == kDense) {
      for (int64_t i = 0; i < num_elements; ++i) {
        combine(total[i], c10::convert<acc_t>(read<T>(source + i * kDense)));
      }
    } else {
      for (int64_t i = 0; i < num_elements; ++i) {
        combine(total[i], c10::convert<acc_t>(read<T>(source + i * stride)));
      }
    }
  };
  if (is_add) {
    each([](acc_t& sum, acc_t value) { sum = add(sum, value); });
  } else {
    each([](acc_t& sum, acc_t value) { sum = value; });
  }
}

template <typename acc_t, typename T>
void store(
    const void* sum,
    char* result,
    int64_t stride,
    int64_t num_elements) {
  const auto* const total = static_cast<const acc_t*>(sum);
  if constexpr (kIsHalfPrecision<acc_t, T>) {
    if (stride == static_cast<int64_t>(sizeof(T))) {
      if constexpr (std::is_same_v<T, c10::Half>) {
        store_half(total, result, num_elements);
      } else {
        store_bfloat16(total, result, num_elements);
      }
      return;
    }
  }
  for (int64_t i = 0; i < num_elements; ++i) {
    const T value = c10::convert<T>(total[i]);
    std::memcpy(result + i * stride, &value, sizeof(T));
  }
}

} // namespace

template <typename acc_t>
Access access(c10::ScalarType dtype) {
  return AT_DISPATCH_V2(
      dtype,
      "torchkv sum",
      AT_WRAP([&] {
        return Access{&load<acc_t, scalar_t>, &store<acc_t, scalar_t>};
      }),
      AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX),
      AT_EXPAND(AT_FLOAT8_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      at::kBool,
      at::kHalf,
      at::kBFloat16,
      at::kComplexHalf);
}

template Access access<bool>(c10::ScalarType dtype);
template Access access<float>(c10::ScalarType dtype);
template Access access<double>(c10::ScalarType dtype);
template Access access<int64_t>(c10::ScalarType dtype);
template Access access<c10::complex<float>>(c10::ScalarType dtype);
template Access access<c10::complex<double>>(c10::ScalarType dtype);

} // namespace torchkv::kernels::cpu

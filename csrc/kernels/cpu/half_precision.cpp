#include "half_precision.h"

#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "clones.h"

namespace torchkv::kernels::cpu {
namespace {

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

} // namespace

template <typename T>
void load_half_precision(
    const char* source,
    bool is_add,
    float* total,
    int64_t num_elements) {
  if constexpr (std::is_same_v<T, c10::Half>) {
    load_half(source, is_add, total, num_elements);
  } else {
    (is_add ? &load_bfloat16<true>
            : &load_bfloat16<false>)(source, total, num_elements);
  }
}

template <typename T>
void store_half_precision(
    const float* total,
    char* result,
    int64_t num_elements) {
  if constexpr (std::is_same_v<T, c10::Half>) {
    store_half(total, result, num_elements);
  } else {
    store_bfloat16(total, result, num_elements);
  }
}

using c10::BFloat16;
using c10::Half;
template void load_half_precision<BFloat16>(const char*, bool, float*, int64_t);
template void load_half_precision<Half>(const char*, bool, float*, int64_t);
template void store_half_precision<BFloat16>(const float*, char*, int64_t);
template void store_half_precision<Half>(const float*, char*, int64_t);

} // namespace torchkv::kernels::cpu

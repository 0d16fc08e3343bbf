#include "dense_add.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cache_line.h"
#include "clones.h"
#include "half_precision.h"

namespace torchkv::kernels::cpu {
namespace {

// A cache line of T, at any address.
template <typename T>
struct Pack {
  using type __attribute__((vector_size(kCacheLine), aligned(1), may_alias)) =
      T;
};

// Four cache lines of each value at a time, so that the sum stays in registers.
template <typename T>
TORCHKV_CLONES void add_dense(
    const char* const* values,
    size_t num_values,
    char* result,
    int64_t num_elements,
    bool stream) {
  using pack_t = typename Pack<T>::type;
  constexpr int64_t kPacks = 4;
  constexpr int64_t kStep = kPacks * kCacheLine;
  const int64_t num_bytes = num_elements * static_cast<int64_t>(sizeof(T));
  int64_t i = 0;
  for (; i + kStep <= num_bytes; i += kStep) {
    alignas(kCacheLine) T total[kStep / sizeof(T)];
    auto* packs = reinterpret_cast<pack_t*>(total);
    prefetch(values[0] + i, kStep);
    const auto* first = reinterpret_cast<const pack_t*>(values[0] + i);
    pack_t sum0 = first[0];
    pack_t sum1 = first[1];
    pack_t sum2 = first[2];
    pack_t sum3 = first[3];
    for (size_t k = 1; k < num_values; ++k) {
      prefetch(values[k] + i, kStep);
      const auto* next = reinterpret_cast<const pack_t*>(values[k] + i);
      sum0 += next[0];
      sum1 += next[1];
      sum2 += next[2];
      sum3 += next[3];
    }
    if (stream) {
      packs[0] = sum0;
      packs[1] = sum1;
      packs[2] = sum2;
      packs[3] = sum3;
      const auto* line = reinterpret_cast<const char*>(total);
      TORCHKV_STREAM_LINE(result + i, line);
      TORCHKV_STREAM_LINE(result + i + kCacheLine, line + kCacheLine);
      TORCHKV_STREAM_LINE(result + i + 2 * kCacheLine, line + 2 * kCacheLine);
      TORCHKV_STREAM_LINE(result + i + 3 * kCacheLine, line + 3 * kCacheLine);
    } else {
      auto* out = reinterpret_cast<pack_t*>(result + i);
      out[0] = sum0;
      out[1] = sum1;
      out[2] = sum2;
      out[3] = sum3;
    }
  }
  for (; i < num_bytes; i += static_cast<int64_t>(sizeof(T))) {
    T total;
    std::memcpy(&total, values[0] + i, sizeof(T));
    for (size_t k = 1; k < num_values; ++k) {
      T next;
      std::memcpy(&next, values[k] + i, sizeof(T));
      total = static_cast<T>(total + next);
    }
    std::memcpy(result + i, &total, sizeof(T));
  }
}

// A 32-bit word holds two bfloat16 numbers, which are `word << 16` and
// `word & 0xFFFF0000` as floats.
TORCHKV_CLONES void add_dense_bfloat16(
    const char* const* values,
    size_t num_values,
    char* result,
    int64_t num_elements,
    bool stream) {
  using words_t = typename Pack<uint32_t>::type;
  using floats_t = typename Pack<float>::type;
  constexpr int64_t kPacks = 4;
  constexpr int64_t kStep = kPacks * kCacheLine;
  const int64_t num_bytes = num_elements * 2;
  int64_t i = 0;
  for (; i + kStep <= num_bytes; i += kStep) {
    alignas(kCacheLine) char rounded[kStep];
    floats_t even[kPacks];
    floats_t odd[kPacks];
    prefetch(values[0] + i, kStep);
    for (int64_t p = 0; p < kPacks; ++p) {
      const words_t words = reinterpret_cast<const words_t*>(values[0] + i)[p];
      even[p] = reinterpret_cast<floats_t>(words << 16U);
      odd[p] = reinterpret_cast<floats_t>(words & 0xFFFF0000U);
    }
    for (size_t k = 1; k < num_values; ++k) {
      prefetch(values[k] + i, kStep);
      for (int64_t p = 0; p < kPacks; ++p) {
        const words_t words =
            reinterpret_cast<const words_t*>(values[k] + i)[p];
        even[p] += reinterpret_cast<floats_t>(words << 16U);
        odd[p] += reinterpret_cast<floats_t>(words & 0xFFFF0000U);
      }
    }
    auto* out = reinterpret_cast<words_t*>(stream ? rounded : result + i);
    for (int64_t p = 0; p < kPacks; ++p) {
      const auto low = reinterpret_cast<words_t>(even[p]);
      const auto high = reinterpret_cast<words_t>(odd[p]);
      out[p] = (TORCHKV_ROUND_BFLOAT16(low) >> 16U) |
          (TORCHKV_ROUND_BFLOAT16(high) & 0xFFFF0000U);
    }
    if (stream) {
      for (int64_t line = 0; line < kStep; line += kCacheLine) {
        TORCHKV_STREAM_LINE(result + i + line, rounded + line);
      }
    }
  }
  for (; i < num_bytes; i += 2) {
    float total = read_bfloat16(values[0] + i);
    for (size_t k = 1; k < num_values; ++k) {
      total += read_bfloat16(values[k] + i);
    }
    write_bfloat16(total, result + i);
  }
}

// The elements [begin, num_elements).
void add_dense_half_one_by_one(
    const char* const* values,
    size_t num_values,
    char* result,
    int64_t begin,
    int64_t num_elements) {
  for (int64_t i = begin; i < num_elements; ++i) {
    float total = read_half(values[0] + 2 * i);
    for (size_t k = 1; k < num_values; ++k) {
      total += read_half(values[k] + 2 * i);
    }
    write_half(total, result + 2 * i);
  }
}

#if TORCHKV_HAS_F16C
TORCHKV_F16C void add_dense_half(
    const char* const* values,
    size_t num_values,
    char* result,
    int64_t num_elements,
    bool stream) {
  constexpr int64_t kWidth = 8; // elements of a register
  constexpr int64_t kSums = 8;
  int64_t i = 0;
  for (; i + kSums * kWidth <= num_elements; i += kSums * kWidth) {
    __m256 sums[kSums];
    prefetch(values[0] + 2 * i, kSums * kWidth * 2);
    const auto* first = reinterpret_cast<const __m128i*>(values[0] + 2 * i);
    for (int64_t j = 0; j < kSums; ++j) {
      sums[j] = _mm256_cvtph_ps(_mm_loadu_si128(first + j));
    }
    for (size_t k = 1; k < num_values; ++k) {
      prefetch(values[k] + 2 * i, kSums * kWidth * 2);
      const auto* next = reinterpret_cast<const __m128i*>(values[k] + 2 * i);
      for (int64_t j = 0; j < kSums; ++j) {
        sums[j] =
            _mm256_add_ps(sums[j], _mm256_cvtph_ps(_mm_loadu_si128(next + j)));
      }
    }
    auto* out = reinterpret_cast<__m128i*>(result + 2 * i);
    for (int64_t j = 0; j < kSums; ++j) {
      const __m128i half = _mm256_cvtps_ph(sums[j], _MM_FROUND_TO_NEAREST_INT);
      if (stream) {
        _mm_stream_si128(out + j, half);
      } else {
        _mm_storeu_si128(out + j, half);
      }
    }
  }
  add_dense_half_one_by_one(values, num_values, result, i, num_elements);
}
#endif

#ifndef TORCHKV_ONLY_F16C
TORCHKV_F16C_DEFAULT void add_dense_half(
    const char* const* values,
    size_t num_values,
    char* result,
    int64_t num_elements,
    bool /*stream*/) {
  add_dense_half_one_by_one(values, num_values, result, 0, num_elements);
}
#endif

} // namespace

DenseAdd dense_add(c10::ScalarType dtype) {
  const int64_t numbers_per_element = c10::isComplexType(dtype) ? 2 : 1;
  switch (c10::toRealValueType(dtype)) {
    case c10::kFloat:
      return {&add_dense<float>, numbers_per_element};
    case c10::kDouble:
      return {&add_dense<double>, numbers_per_element};
    case c10::kHalf:
      return {&add_dense_half, numbers_per_element};
    case c10::kBFloat16:
      return {&add_dense_bfloat16, 1};
    case c10::kChar:
    case c10::kByte:
      return {&add_dense<uint8_t>, 1};
    case c10::kShort:
    case c10::kUInt16:
      return {&add_dense<uint16_t>, 1};
    case c10::kInt:
    case c10::kUInt32:
      return {&add_dense<uint32_t>, 1};
    case c10::kLong:
    case c10::kUInt64:
      return {&add_dense<uint64_t>, 1};
    default:
      return {};
  }
}

} // namespace torchkv::kernels::cpu

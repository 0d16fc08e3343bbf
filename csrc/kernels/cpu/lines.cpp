#include "lines.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/SmallVector.h>
#include <c10/util/TypeCast.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../../errors.h"
#include "../sgd.h"
#include "clones.h"

namespace torchkv::kernels::cpu {
namespace {

// Sums that are not done when they are added up (other dtypes, a rule) wait in
// a block of this many elements: 1 KiB in fp32, in the first-level cache.
// Longer blocks jump between replicas in strides that the hardware's
// prefetchers follow worse.
constexpr int64_t kBlock = 256;

constexpr int64_t kCacheLine = 64;

// A cache line of T, anywhere in memory.
template <typename T>
struct Pack {
  using type __attribute__((vector_size(kCacheLine), aligned(1), may_alias)) =
      T;
};

// --- Writing past the caches

#if defined(__x86_64__)
// A macro, because vector arguments pass differently in each clone.
#define TORCHKV_STREAM_LINE(destination, source)                 \
  do {                                                           \
    auto* to = reinterpret_cast<__m128i*>(destination);          \
    const auto* from = reinterpret_cast<const __m128i*>(source); \
    _mm_stream_si128(to, _mm_loadu_si128(from));                 \
    _mm_stream_si128(to + 1, _mm_loadu_si128(from + 1));         \
    _mm_stream_si128(to + 2, _mm_loadu_si128(from + 2));         \
    _mm_stream_si128(to + 3, _mm_loadu_si128(from + 3));         \
  } while (false)
#else
#define TORCHKV_STREAM_LINE(destination, source) \
  std::memcpy(destination, source, kCacheLine)
#endif

int64_t bytes_to_alignment(const char* address) {
  const auto past = reinterpret_cast<uintptr_t>(address) % kCacheLine;
  return past == 0 ? 0 : kCacheLine - static_cast<int64_t>(past);
}

void stream_copy(const char* source, char* destination, int64_t num_bytes) {
  const int64_t head = std::min(bytes_to_alignment(destination), num_bytes);
  std::memmove(destination, source, head);
  int64_t i = head;
  for (; i + kCacheLine <= num_bytes; i += kCacheLine) {
    TORCHKV_STREAM_LINE(destination + i, source + i);
  }
  std::memmove(destination + i, source + i, num_bytes - i);
}

// Asks for what a loop will read some steps from now. Conversions between the
// loads leave the processor too few of them to look ahead at by itself.
inline __attribute__((always_inline)) void prefetch(
    const char* data,
    int64_t num_bytes) {
  constexpr int64_t kAhead = 1024;
  for (int64_t line = 0; line < num_bytes; line += kCacheLine) {
    __builtin_prefetch(data + kAhead + line);
  }
}

// --- Sums in registers

// Four cache lines of each value at a time, so that the sum stays in registers.
// REQUIRES for `stream`: an aligned result.
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

// bfloat16 is the upper half of a float, so that a word of memory, as it lies
// there, holds two floats: `word << 16` and `word & 0xFFFF0000`.
#define TORCHKV_ROUND_BFLOAT16(bits)             \
  (((bits) & 0x7FFFFFFFU) > 0x7F800000U          \
       ? (bits) - (bits) + 0x7FC00000U /* NaN */ \
       : (bits) + 0x7FFFU + (((bits) >> 16U) & 1U) /* to nearest, to even */)

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
    float total = 0;
    for (size_t k = 0; k < num_values; ++k) {
      uint16_t half;
      std::memcpy(&half, values[k] + i, sizeof(half));
      const uint32_t bits = static_cast<uint32_t>(half) << 16U;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      total = k == 0 ? value : total + value;
    }
    uint32_t bits;
    std::memcpy(&bits, &total, sizeof(bits));
    const auto half =
        static_cast<uint16_t>(TORCHKV_ROUND_BFLOAT16(bits) >> 16U);
    std::memcpy(result + i, &half, sizeof(half));
  }
}

// --- Half precision

template <bool kAdd>
TORCHKV_CLONES void load_bfloat16(
    const char* source,
    float* total,
    int64_t num_elements) {
  for (int64_t i = 0; i < num_elements; ++i) {
    uint16_t half;
    std::memcpy(&half, source + 2 * i, sizeof(half));
    const uint32_t bits = static_cast<uint32_t>(half) << 16U;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    total[i] = kAdd ? total[i] + value : value;
  }
}

TORCHKV_CLONES void store_bfloat16(
    const float* total,
    char* result,
    int64_t num_elements) {
  for (int64_t i = 0; i < num_elements; ++i) {
    uint32_t bits;
    std::memcpy(&bits, total + i, sizeof(bits));
    const auto half =
        static_cast<uint16_t>(TORCHKV_ROUND_BFLOAT16(bits) >> 16U);
    std::memcpy(result + 2 * i, &half, sizeof(half));
  }
}

template <bool kAdd>
void load_half_one_by_one(
    const char* source,
    float* total,
    int64_t num_elements) {
  for (int64_t i = 0; i < num_elements; ++i) {
    c10::Half half;
    std::memcpy(&half, source + 2 * i, sizeof(half));
    const auto value = static_cast<float>(half);
    total[i] = kAdd ? total[i] + value : value;
  }
}

void store_half_one_by_one(
    const float* total,
    char* result,
    int64_t num_elements) {
  for (int64_t i = 0; i < num_elements; ++i) {
    const c10::Half half(total[i]);
    std::memcpy(result + 2 * i, &half, sizeof(half));
  }
}

// From `begin` on.
void add_dense_half_one_by_one(
    const char* const* values,
    size_t num_values,
    char* result,
    int64_t begin,
    int64_t num_elements) {
  for (int64_t i = begin; i < num_elements; ++i) {
    float total = 0;
    for (size_t k = 0; k < num_values; ++k) {
      c10::Half half;
      std::memcpy(&half, values[k] + 2 * i, sizeof(half));
      const auto value = static_cast<float>(half);
      total = k == 0 ? value : total + value;
    }
    const c10::Half half(total);
    std::memcpy(result + 2 * i, &half, sizeof(half));
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

TORCHKV_F16C void load_half(
    const char* source,
    float* total,
    int64_t num_elements,
    bool add) {
  int64_t i = 0;
  for (; i + 8 <= num_elements; i += 8) {
    const __m128i half =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 2 * i));
    __m256 value = _mm256_cvtph_ps(half);
    if (add) {
      value = _mm256_add_ps(_mm256_loadu_ps(total + i), value);
    }
    _mm256_storeu_ps(total + i, value);
  }
  if (add) {
    load_half_one_by_one<true>(source + 2 * i, total + i, num_elements - i);
  } else {
    load_half_one_by_one<false>(source + 2 * i, total + i, num_elements - i);
  }
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
TORCHKV_F16C_DEFAULT void add_dense_half(
    const char* const* values,
    size_t num_values,
    char* result,
    int64_t num_elements,
    bool /*stream*/) {
  add_dense_half_one_by_one(values, num_values, result, 0, num_elements);
}

TORCHKV_F16C_DEFAULT void load_half(
    const char* source,
    float* total,
    int64_t num_elements,
    bool add) {
  if (add) {
    load_half_one_by_one<true>(source, total, num_elements);
  } else {
    load_half_one_by_one<false>(source, total, num_elements);
  }
}

TORCHKV_F16C_DEFAULT void store_half(
    const float* total,
    char* result,
    int64_t num_elements) {
  store_half_one_by_one(total, result, num_elements);
}
#endif

// --- Dense values of one dtype

// No function where the dtype is added in another one.
DenseAdd dense_add(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return {&add_dense<float>, 1};
    case c10::kDouble:
      return {&add_dense<double>, 1};
    case c10::kComplexFloat:
      return {&add_dense<float>, 2};
    case c10::kComplexDouble:
      return {&add_dense<double>, 2};
    case c10::kBFloat16:
      return {&add_dense_bfloat16, 1};
    case c10::kHalf:
      return {&add_dense_half, 1};
    case c10::kComplexHalf:
      return {&add_dense_half, 2};
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

// --- Any dtype and stride, in blocks

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
    value = *address != 0; // other bytes than 0 and 1 are no bool in C++
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
    acc_t* total,
    int64_t num_elements) {
  // Dense and repeated ones get loops of their own, which the compiler
  // vectorises.
  constexpr auto kDense = static_cast<int64_t>(sizeof(T));
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

template <>
void load<float, c10::BFloat16>(
    const char* source,
    int64_t stride,
    bool is_add,
    float* total,
    int64_t num_elements) {
  if (stride == 2) {
    (is_add ? &load_bfloat16<true>
            : &load_bfloat16<false>)(source, total, num_elements);
    return;
  }
  for (int64_t i = 0; i < num_elements; ++i) {
    const float value = read<c10::BFloat16>(source + i * stride);
    total[i] = is_add ? total[i] + value : value;
  }
}

template <>
void load<float, c10::Half>(
    const char* source,
    int64_t stride,
    bool is_add,
    float* total,
    int64_t num_elements) {
  if (stride == 2) {
    load_half(source, total, num_elements, is_add);
    return;
  }
  for (int64_t i = 0; i < num_elements; ++i) {
    const float value = read<c10::Half>(source + i * stride);
    total[i] = is_add ? total[i] + value : value;
  }
}

template <typename acc_t, typename T>
void store(
    const acc_t* total,
    char* result,
    int64_t stride,
    int64_t num_elements) {
  if constexpr (std::is_same_v<acc_t, float>) {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      if (stride == 2) {
        store_bfloat16(total, result, num_elements);
        return;
      }
    } else if constexpr (std::is_same_v<T, c10::Half>) {
      if (stride == 2) {
        store_half(total, result, num_elements);
        return;
      }
    }
  }
  for (int64_t i = 0; i < num_elements; ++i) {
    const T value = c10::convert<T>(total[i]);
    std::memcpy(result + i * stride, &value, sizeof(T));
  }
}

// What reads and writes one dtype, when sums are in acc_t.
template <typename acc_t>
struct Access {
  void (*load)(
      const char* source,
      int64_t stride,
      bool is_add,
      acc_t* total,
      int64_t num_elements);
  void (*store)(
      const acc_t* total,
      char* result,
      int64_t stride,
      int64_t num_elements);
};

template <typename acc_t>
Access<acc_t> access(c10::ScalarType dtype) {
  return AT_DISPATCH_V2(
      dtype,
      "torchkv sum",
      AT_WRAP([&] {
        return Access<acc_t>{&load<acc_t, scalar_t>, &store<acc_t, scalar_t>};
      }),
      AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX),
      AT_EXPAND(AT_FLOAT8_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      at::kBool,
      at::kHalf,
      at::kBFloat16,
      at::kComplexHalf);
}

// --- Rules

template <typename acc_t, bool kHasWeightDecay>
TORCHKV_CLONES void apply_sgd(
    const RuleSpec& rule,
    const acc_t* total,
    acc_t* stored,
    int64_t num_elements) {
  using real_t = typename c10::scalar_value_type<acc_t>::type;
  const auto learning_rate = static_cast<real_t>(rule.learning_rate);
  const auto weight_decay = static_cast<real_t>(rule.weight_decay);
  for (int64_t i = 0; i < num_elements; ++i) {
    stored[i] =
        sgd<kHasWeightDecay>(stored[i], total[i], learning_rate, weight_decay);
  }
}

template <typename acc_t>
void apply(
    const RuleSpec& rule,
    const acc_t* total,
    acc_t* stored,
    int64_t num_elements) {
  TORCHKV_INTERNAL_ASSERT(rule.id == RuleSpec::Id::kSgd);
  if constexpr (std::is_integral_v<acc_t>) {
    TORCHKV_INTERNAL_ASSERT(false, "SGD on integers");
  } else if (rule.weight_decay != 0) {
    apply_sgd<acc_t, true>(rule, total, stored, num_elements);
  } else {
    apply_sgd<acc_t, false>(rule, total, stored, num_elements);
  }
}

// Numbers until `address` is aligned.
int64_t head_of(const char* address, int64_t num_numbers, int64_t number_size) {
  return std::min(num_numbers, bytes_to_alignment(address) / number_size);
}

} // namespace

// --- A line

SumLine::SumLine(
    c10::ArrayRef<c10::ScalarType> values,
    c10::ScalarType stored,
    c10::ScalarType accumulation,
    const RuleSpec& rule,
    Layout layout)
    : rule_(rule),
      stored_(stored),
      is_assign_(rule.id == RuleSpec::Id::kAssign),
      stored_size_(static_cast<int64_t>(c10::elementSize(stored))) {
  for (const auto dtype : values) {
    sizes_.push_back(static_cast<int64_t>(c10::elementSize(dtype)));
    is_uniform_ = is_uniform_ && dtype == stored;
  }
  if (is_assign_ && is_uniform_) {
    dense_add_ = cpu::dense_add(stored);
    const bool needs_no_blocks =
        values.size() == 1 || dense_add_.function != nullptr;
    if (needs_no_blocks && layout == Layout::kDense) {
      return;
    }
  }
  switch (accumulation) {
    case c10::kBool:
      look_up<bool>(values);
      break;
    case c10::kFloat:
      look_up<float>(values);
      break;
    case c10::kDouble:
      look_up<double>(values);
      break;
    case c10::kComplexFloat:
      look_up<c10::complex<float>>(values);
      break;
    case c10::kComplexDouble:
      look_up<c10::complex<double>>(values);
      break;
    default:
      // The low bits of a sum of integers do not depend on its width.
      look_up<int64_t>(values);
  }
}

template <typename acc_t>
void SumLine::look_up(c10::ArrayRef<c10::ScalarType> values) {
  constexpr auto kAccumulation = c10::CppTypeToScalarType<acc_t>::value;
  sum_blocks_ = &SumLine::sum_blocks<acc_t>;
  const Access<acc_t> stored = access<acc_t>(stored_);
  load_stored_ = reinterpret_cast<AnyFunction>(stored.load);
  store_ = reinterpret_cast<AnyFunction>(stored.store);
  bool is_ready = true;
  for (const auto dtype : values) {
    loads_.push_back(reinterpret_cast<AnyFunction>(access<acc_t>(dtype).load));
    is_ready = is_ready && dtype == kAccumulation;
  }
  if (is_ready) {
    ready_add_ = cpu::dense_add(kAccumulation);
  }
}

// values --> total[kBlock] --> rule --> stored, block by block.
template <typename acc_t>
void SumLine::sum_blocks(
    Sources sources,
    const int64_t* strides,
    char* stored,
    int64_t stored_stride,
    int64_t num_elements,
    bool stream) const {
  const auto load_of = [](AnyFunction function) {
    return reinterpret_cast<decltype(Access<acc_t>::load)>(function);
  };
  const auto load_stored = load_of(load_stored_);
  const auto store = reinterpret_cast<decltype(Access<acc_t>::store)>(store_);
  const bool is_dense = stored_stride == stored_size_;
  const bool is_ready = ready_add_.function != nullptr &&
      std::equal(sizes_.begin(), sizes_.end(), strides);
  // A rule may work on the stored value itself.
  const bool in_place = !is_assign_ && is_dense &&
      stored_ == c10::CppTypeToScalarType<acc_t>::value &&
      reinterpret_cast<uintptr_t>(stored) % alignof(acc_t) == 0;

  alignas(kCacheLine) acc_t total[kBlock];
  alignas(kCacheLine) acc_t loaded[kBlock];
  alignas(kCacheLine) char rounded[kBlock * sizeof(c10::complex<double>)];
  const int64_t head = stream ? head_of(stored, num_elements, stored_size_) : 0;
  int64_t size = std::min(head > 0 ? head : num_elements, kBlock);
  for (int64_t left = num_elements; left > 0;) {
    if (is_ready) {
      ready_add_.function(
          sources.data(),
          sources.size(),
          reinterpret_cast<char*>(total),
          size * ready_add_.numbers_per_element,
          /*stream=*/false);
    } else {
      for (size_t k = 0; k < sources.size(); ++k) {
        load_of(loads_[k])(sources[k], strides[k], k != 0, total, size);
      }
    }
    if (in_place) {
      apply(rule_, total, reinterpret_cast<acc_t*>(stored), size);
    } else {
      const acc_t* next = total;
      if (!is_assign_) {
        load_stored(stored, stored_stride, /*is_add=*/false, loaded, size);
        apply(rule_, total, loaded, size);
        next = loaded;
      }
      if (stream) {
        store(next, rounded, stored_size_, size);
        stream_copy(rounded, stored, size * stored_size_);
      } else {
        store(next, stored, stored_stride, size);
      }
    }
    for (size_t k = 0; k < sources.size(); ++k) {
      sources[k] += size * strides[k];
    }
    stored += size * stored_stride;
    left -= size;
    size = std::min(left, kBlock);
  }
}

void SumLine::dense(
    const char* const* values,
    char* stored,
    int64_t num_elements,
    bool stream) const {
  const size_t num_values = sizes_.size();
  // What a rule has just read is in the cache already.
  stream = stream && is_assign_;
  if (is_assign_ && is_uniform_ && num_values == 1) {
    copy_line(values[0], stored, num_elements * stored_size_, stream);
    return;
  }
  Sources sources(values, values + num_values);
  if (dense_add_.function == nullptr) {
    (this->*sum_blocks_)(
        std::move(sources),
        sizes_.data(),
        stored,
        stored_size_,
        num_elements,
        stream);
    return;
  }
  const int64_t number_size = stored_size_ / dense_add_.numbers_per_element;
  int64_t num_numbers = num_elements * dense_add_.numbers_per_element;
  if (stream) {
    const int64_t head = head_of(stored, num_numbers, number_size);
    dense_add_.function(values, num_values, stored, head, /*stream=*/false);
    for (auto& source : sources) {
      source += head * number_size;
    }
    stored += head * number_size;
    num_numbers -= head;
    stream = bytes_to_alignment(stored) == 0;
  }
  dense_add_.function(sources.data(), num_values, stored, num_numbers, stream);
}

void SumLine::strided(
    const char* const* values,
    const int64_t* value_strides,
    char* stored,
    int64_t stored_stride,
    int64_t num_elements) const {
  if (stored_stride == stored_size_ &&
      std::equal(sizes_.begin(), sizes_.end(), value_strides)) {
    dense(values, stored, num_elements, /*stream=*/false);
    return;
  }
  (this->*sum_blocks_)(
      Sources(values, values + sizes_.size()),
      value_strides,
      stored,
      stored_stride,
      num_elements,
      /*stream=*/false);
}

void copy_line(
    const char* source,
    c10::ArrayRef<char*> outs,
    int64_t num_bytes,
    bool stream) {
  // An L1-sized piece at a time, so that the source is read from memory once.
  constexpr int64_t kPiece = 2048;
  const int64_t step = outs.size() == 1 ? num_bytes : kPiece;
  for (int64_t i = 0; i < num_bytes; i += step) {
    const int64_t size = std::min(step, num_bytes - i);
    for (char* out : outs) {
      if (stream) {
        stream_copy(source + i, out + i, size);
      } else {
        std::memmove(out + i, source + i, size);
      }
    }
  }
}

void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

} // namespace torchkv::kernels::cpu

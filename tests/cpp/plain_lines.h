#pragma once

#include <ATen/Dispatch_v2.h>
#include <ATen/OpMathType.h>
#include <c10/util/TypeCast.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "core/rule.h"

// The reference for sums of lines: numbers of any dtype, memory with guard
// bytes, and a plain loop.
namespace torchkv::testing {

using c10::ScalarType;

#define TORCHKV_TEST_DISPATCH(dtype, ...)     \
  AT_DISPATCH_V2(                             \
      dtype,                                  \
      "torchkv tests",                        \
      AT_WRAP(__VA_ARGS__),                   \
      AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX),    \
      AT_EXPAND(AT_FLOAT8_TYPES),             \
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), \
      at::kBool,                              \
      at::kHalf,                              \
      at::kBFloat16,                          \
      at::kComplexHalf)

inline int64_t size_of(ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

template <typename acc_t>
acc_t read(ScalarType dtype, const char* address) {
  return TORCHKV_TEST_DISPATCH(dtype, [&] {
    if constexpr (std::is_same_v<scalar_t, bool>) {
      return c10::convert<acc_t>(*address != 0);
    } else {
      scalar_t value;
      std::memcpy(&value, address, sizeof(value));
      return c10::convert<acc_t>(value);
    }
  });
}

template <typename acc_t>
void write(ScalarType dtype, char* address, acc_t number) {
  TORCHKV_TEST_DISPATCH(dtype, [&] {
    const auto value = c10::convert<scalar_t>(number);
    std::memcpy(address, &value, sizeof(value));
  });
}

template <typename T>
bool is_nan(T number) {
  if constexpr (std::is_integral_v<T>) {
    return false;
  } else {
    return std::isnan(static_cast<double>(static_cast<float>(number)));
  }
}

template <>
inline bool is_nan(double number) {
  return std::isnan(number);
}

// Index of the first number whose bits differ, or -1.
inline int64_t first_difference(
    ScalarType dtype,
    const char* actual,
    const char* expected,
    int64_t num_elements) {
  if (num_elements == 0 ||
      std::memcmp(actual, expected, num_elements * size_of(dtype)) == 0) {
    return -1;
  }
  return TORCHKV_TEST_DISPATCH(dtype, [&]() -> int64_t {
    using real_t = typename c10::scalar_value_type<scalar_t>::type;
    constexpr int64_t kSize = sizeof(real_t);
    for (int64_t i = 0; i < num_elements * size_of(dtype); i += kSize) {
      if (std::memcmp(actual + i, expected + i, kSize) != 0) {
        real_t a;
        real_t b;
        std::memcpy(&a, actual + i, kSize);
        std::memcpy(&b, expected + i, kSize);
        if (!is_nan(a) || !is_nan(b)) {
          return i / size_of(dtype);
        }
      }
    }
    return -1;
  });
}

// --- Memory

// Bytes at a chosen offset from a multiple of 64, with guard bytes on both
// sides.
class Memory {
 public:
  Memory(int64_t num_bytes, int64_t offset)
      : bytes_(num_bytes + 3 * kLine, kGuard),
        size_(num_bytes),
        offset_(offset) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    begin_ = (kLine - static_cast<int64_t>(address % kLine)) % kLine + kLine +
        offset;
  }
  // With the same offset.
  Memory(const Memory& other) : Memory(other.size_, other.offset_) {
    std::copy_n(other.bytes_.data() + other.begin_, size_, data());
  }
  Memory(Memory&&) noexcept = default;
  Memory& operator=(const Memory&) = delete;
  Memory& operator=(Memory&&) = delete;
  ~Memory() = default;

  char* data() {
    return bytes_.data() + begin_;
  }
  bool guards_are_intact() const {
    const auto is_guard = [](char byte) { return byte == kGuard; };
    return std::all_of(bytes_.begin(), bytes_.begin() + begin_, is_guard) &&
        std::all_of(bytes_.begin() + begin_ + size_, bytes_.end(), is_guard);
  }

  static constexpr char kGuard = 0x5A;

 private:
  static constexpr int64_t kLine = 64;

  std::vector<char> bytes_;
  const int64_t size_;
  const int64_t offset_;
  int64_t begin_ = 0;
};

// Numbers over several binades, so that the order of additions affects the
// bits; a quarter of them special values or random bits.
inline void fill(
    std::mt19937_64& random,
    ScalarType dtype,
    char* data,
    int64_t num_elements,
    bool all_bits) {
  constexpr double kSpecial[] = {
      INFINITY, -INFINITY,  NAN,        -0.0,  0.0,   1e-310, -1e-42,
      6e-8,     -9.2e-41,   65504,      65519, 65520, -65536, 3.3e38,
      -1.7e308, 1.00390625, 1.01171875, 2049,  2051,  448,    57344};
  for (int64_t i = 0; i < num_elements; ++i) {
    char* address = data + i * size_of(dtype);
    const auto number = [&] {
      const double mantissa = std::uniform_real_distribution(-1., 1.)(random);
      return std::ldexp(mantissa, static_cast<int>(random() % 12));
    };
    if (all_bits || random() % 8 == 0) {
      for (int64_t byte = 0; byte < size_of(dtype); ++byte) {
        address[byte] = static_cast<char>(random());
      }
    } else if (c10::isIntegralType(dtype, /*includeBool=*/true)) {
      write<int64_t>(dtype, address, static_cast<int64_t>(number()));
    } else {
      const bool special = random() % 8 == 0;
      const auto next = [&] {
        return special ? kSpecial[random() % std::size(kSpecial)] : number();
      };
      write(dtype, address, c10::complex<double>(next(), next()));
    }
  }
}

// --- The plain loop

template <typename acc_t>
acc_t add(acc_t a, acc_t b) {
  if constexpr (std::is_same_v<acc_t, bool>) {
    return a || b;
  } else if constexpr (std::is_integral_v<acc_t>) {
    return static_cast<acc_t>(
        static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

// The rule on one element, in the arithmetic of the stored dtype.
template <typename weight_t>
weight_t sgd_step(const RuleSpec& rule, weight_t stored, weight_t sum) {
  using real_t = typename c10::scalar_value_type<weight_t>::type;
  const auto lr = static_cast<real_t>(rule.lr);
  const auto decay = static_cast<real_t>(rule.weight_decay);
  if (decay != 0) {
    sum = sum + decay * stored;
  }
  return stored - lr * sum;
}

template <typename acc_t>
void step(
    const RuleSpec& rule,
    ScalarType dtype,
    const char* stored,
    acc_t sum,
    char* result) {
  if (rule.id == RuleSpec::Id::kAssign) {
    write<acc_t>(dtype, result, sum);
    return;
  }
  const auto in = [&](auto zero) {
    using weight_t = decltype(zero);
    const auto old = read<weight_t>(dtype, stored);
    write<weight_t>(
        dtype, result, sgd_step(rule, old, c10::convert<weight_t>(sum)));
  };
  switch (at::toOpMathType(dtype)) {
    case c10::kDouble:
      return in(double());
    case c10::kComplexFloat:
      return in(c10::complex<float>());
    case c10::kComplexDouble:
      return in(c10::complex<double>());
    default:
      return in(float());
  }
}

// The dtypes of a sum. With fewer dtypes than values, they repeat.
struct Case {
  std::vector<ScalarType> dtypes;
  ScalarType stored;
  ScalarType accumulation;

  ScalarType dtype(int64_t k) const {
    return dtypes[k % static_cast<int64_t>(dtypes.size())];
  }
  bool is_uniform() const {
    return dtypes == std::vector<ScalarType>{stored};
  }
};

inline std::string name_of(const Case& dtypes) {
  std::string name;
  for (const auto dtype : dtypes.dtypes) {
    name += std::string(c10::toString(dtype)) + '_';
  }
  return name + "into_" + c10::toString(dtypes.stored);
}

inline void PrintTo(const Case& dtypes, std::ostream* out) {
  *out << name_of(dtypes);
}

struct Line {
  const char* data;
  int64_t stride;
};

template <typename acc_t>
std::vector<std::vector<char>> plain_sums_in(
    const Case& dtypes,
    const RuleSpec& rule,
    const std::vector<Line>& values,
    Line stored,
    int64_t num_elements) {
  std::vector<std::vector<char>> results;
  const int64_t size = size_of(dtypes.stored);
  std::vector<acc_t> total(num_elements);
  for (size_t k = 0; k < values.size(); ++k) {
    auto& result = results.emplace_back(num_elements * size);
    for (int64_t i = 0; i < num_elements; ++i) {
      const char* address = values[k].data + i * values[k].stride;
      const auto value =
          read<acc_t>(dtypes.dtype(static_cast<int64_t>(k)), address);
      total[i] = k == 0 ? value : add<acc_t>(total[i], value);
      char* to = result.data() + i * size;
      if (k == 0 && rule.id == RuleSpec::Id::kAssign && dtypes.is_uniform() &&
          dtypes.stored != at::kBool) {
        std::memcpy(to, address, size); // copied bit by bit
        continue;
      }
      step<acc_t>(
          rule, dtypes.stored, stored.data + i * stored.stride, total[i], to);
    }
  }
  return results;
}

// The results for the first 1, 2, ... values, contiguous.
inline std::vector<std::vector<char>> plain_sums(
    const Case& dtypes,
    const RuleSpec& rule,
    const std::vector<Line>& values,
    Line stored,
    int64_t num_elements) {
  const auto in = [&](auto zero) {
    return plain_sums_in<decltype(zero)>(
        dtypes, rule, values, stored, num_elements);
  };
  switch (dtypes.accumulation) {
    case c10::kBool:
      return in(false);
    case c10::kFloat:
      return in(float());
    case c10::kDouble:
      return in(double());
    case c10::kComplexFloat:
      return in(c10::complex<float>());
    case c10::kComplexDouble:
      return in(c10::complex<double>());
    default:
      return in(int64_t()); // has the low bits of any integer sum
  }
}

} // namespace torchkv::testing

// Lines: the bits of a plain loop, for every dtype, length, alignment and
// stride, and from every processor's clone of the kernels. NaNs compare as NaN.
#include "kernels/cpu/lines.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/OpMathType.h>
#include <c10/util/TypeCast.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "lines_levels.h"

namespace torchkv {
namespace {

using c10::ScalarType;
using testing::levels;
using testing::LineCall;

constexpr int64_t kMaxValues = 9;
constexpr int64_t kMaxLength = 5000;
// Around the steps of the kernels, their blocks and the cache line.
constexpr int64_t kLengths[] = {0,   1,   7,   8,   15,  16,   17,
                                31,  32,  33,  63,  64,  65,   127,
                                128, 129, 255, 256, 257, 1000, kMaxLength};

// --- Numbers of any dtype

#define DISPATCH(dtype, ...)                  \
  AT_DISPATCH_V2(                             \
      dtype,                                  \
      "lines_test",                           \
      AT_WRAP(__VA_ARGS__),                   \
      AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX),    \
      AT_EXPAND(AT_FLOAT8_TYPES),             \
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), \
      at::kBool,                              \
      at::kHalf,                              \
      at::kBFloat16,                          \
      at::kComplexHalf)

int64_t size_of(ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

template <typename acc_t>
acc_t read(ScalarType dtype, const char* address) {
  return DISPATCH(dtype, [&] {
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
  DISPATCH(dtype, [&] {
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
bool is_nan(double number) {
  return std::isnan(number);
}

// Index of the first number whose bits differ, or -1.
int64_t first_difference(
    ScalarType dtype,
    const char* actual,
    const char* expected,
    int64_t num_elements) {
  if (num_elements == 0 ||
      std::memcmp(actual, expected, num_elements * size_of(dtype)) == 0) {
    return -1;
  }
  return DISPATCH(dtype, [&]() -> int64_t {
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

// Bytes at a chosen distance from a multiple of 64, and guards on both sides.
class Memory {
 public:
  Memory(int64_t num_bytes, int64_t offset)
      : bytes_(num_bytes + 3 * kLine, kGuard), size_(num_bytes) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    begin_ = (kLine - static_cast<int64_t>(address % kLine)) % kLine + kLine +
        offset;
  }
  char* data() {
    return bytes_.data() + begin_;
  }
  bool guards_are_whole() const {
    const auto is_guard = [](char byte) { return byte == kGuard; };
    return std::all_of(bytes_.begin(), bytes_.begin() + begin_, is_guard) &&
        std::all_of(bytes_.begin() + begin_ + size_, bytes_.end(), is_guard);
  }

  static constexpr char kGuard = 0x5A;

 private:
  static constexpr int64_t kLine = 64;

  std::vector<char> bytes_;
  int64_t size_;
  int64_t begin_ = 0;
};

// Numbers over several binades, so that the order of a sum shows in its bits;
// every fourth of special value, or of random bits.
void fill(
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
    // A bool of other bytes than 0 and 1 is handed over or made a 1.
    if (all_bits || (random() % 8 == 0 && dtype != at::kBool)) {
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

std::string name_of(const Case& dtypes) {
  std::string name;
  for (const auto dtype : dtypes.dtypes) {
    name += std::string(c10::toString(dtype)) + '_';
  }
  return name + "into_" + c10::toString(dtypes.stored);
}

void PrintTo(const Case& dtypes, std::ostream* out) {
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
      if (k == 0 && rule.id == RuleSpec::Id::kAssign && dtypes.is_uniform()) {
        std::memcpy(to, address, size); // handed over, whatever its bits
        continue;
      }
      step<acc_t>(
          rule, dtypes.stored, stored.data + i * stored.stride, total[i], to);
    }
  }
  return results;
}

// What the first 1, 2, ... values make of the stored one, without gaps.
std::vector<std::vector<char>> plain_sums(
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
      return in(int64_t()); // its low bits are those of any integer sum
  }
}

// --- The tests

RuleSpec sgd(double lr, double weight_decay) {
  return {RuleSpec::Id::kSgd, lr, weight_decay};
}

// ASSIGN for all, SGD for those that it works on.
std::vector<RuleSpec> rules_of(const Case& dtypes) {
  std::vector<RuleSpec> rules{{}};
  if (!c10::isIntegralType(dtypes.stored, /*includeBool=*/true)) {
    rules.push_back(sgd(0.1, 0));
    rules.push_back(sgd(0.1, 0.01));
  }
  return rules;
}

class LinesTest : public ::testing::TestWithParam<Case> {
 protected:
  const Case& dtypes_ = GetParam();
  std::mt19937_64 random_{0};

  LineCall call_of(const RuleSpec& rule, int64_t num_values) {
    values_dtypes_.clear();
    for (int64_t k = 0; k < num_values; ++k) {
      values_dtypes_.push_back(dtypes_.dtype(k));
    }
    LineCall call;
    call.dtypes = values_dtypes_.data();
    call.num_values = num_values;
    call.stored_dtype = dtypes_.stored;
    call.accumulation = dtypes_.accumulation;
    call.step.rule = rule;
    return call;
  }

  std::vector<ScalarType> values_dtypes_;
};

// Where lines begin, counted from a multiple of 64 bytes.
struct Placing {
  const char* name;
  int64_t (*values)(int64_t k, int64_t size);
  int64_t (*stored)(int64_t size);
};

const Placing kPlacings[] = {
    {"aligned",
     [](int64_t, int64_t) -> int64_t { return 0; },
     [](int64_t) -> int64_t { return 0; }},
    {"one element off",
     [](int64_t, int64_t size) { return size; },
     [](int64_t size) { return size; }},
    {"each elsewhere, odd bytes",
     [](int64_t k, int64_t) { return (5 * k + 1) % 64; },
     [](int64_t) -> int64_t { return 3; }},
};

TEST_P(LinesTest, DenseEqualsThePlainLoop) {
  const int64_t size = size_of(dtypes_.stored);
  for (const auto& placing : kPlacings) {
    std::vector<Memory> memory;
    std::vector<Line> lines;
    std::vector<const char*> values;
    memory.reserve(kMaxValues);
    for (int64_t k = 0; k < kMaxValues; ++k) {
      const int64_t value_size = size_of(dtypes_.dtype(k));
      memory.emplace_back(
          kMaxLength * value_size, placing.values(k, value_size));
      fill(random_, dtypes_.dtype(k), memory[k].data(), kMaxLength, false);
      lines.push_back({memory[k].data(), value_size});
      values.push_back(memory[k].data());
    }
    Memory before(kMaxLength * size, 0);
    fill(random_, dtypes_.stored, before.data(), kMaxLength, false);
    for (const auto& rule : rules_of(dtypes_)) {
      const auto expected =
          plain_sums(dtypes_, rule, lines, {before.data(), size}, kMaxLength);
      for (const int64_t length : kLengths) {
        Memory stored(length * size, placing.stored(size));
        for (int64_t n = 1; n <= kMaxValues; ++n) {
          auto call = call_of(rule, n);
          call.values = values.data();
          call.stored = stored.data();
          call.num_elements = length;
          for (const auto& level : levels()) {
            for (const bool stream : {false, true}) {
              std::memcpy(stored.data(), before.data(), length * size);
              call.stream = stream;
              level.function(call);
              ASSERT_EQ(
                  first_difference(
                      dtypes_.stored,
                      stored.data(),
                      expected[n - 1].data(),
                      length),
                  -1)
                  << level.name << ", " << placing.name << ", length " << length
                  << ", " << n << " values, rule " << static_cast<int>(rule.id)
                  << " with weight decay " << rule.weight_decay
                  << (stream ? ", streamed" : "");
              ASSERT_TRUE(stored.guards_are_whole())
                  << level.name << ", " << placing.name << ", length " << length
                  << ", " << n << " values" << (stream ? ", streamed" : "");
            }
          }
        }
      }
    }
  }
}

// Bytes from one element to the next. Of the values, each takes the next one.
struct Strides {
  int64_t (*stored)(int64_t size);
  std::vector<int64_t (*)(int64_t size)> values;
};

const std::vector<Strides>& all_strides() {
  using Stride = int64_t (*)(int64_t);
  static const Stride repeated = [](int64_t) -> int64_t { return 0; };
  static const Stride dense = [](int64_t size) { return size; };
  static const Stride second = [](int64_t size) { return 2 * size; };
  static const Stride odd = [](int64_t size) { return 3 * size + 1; };
  static const Stride far = [](int64_t size) { return 100 * size; };
  static const std::vector<Strides> all{
      {dense, {dense}},
      {dense, {repeated, dense}},
      {dense, {dense, repeated, second}},
      {dense, {far, odd}},
      {second, {dense}},
      {odd, {dense, repeated, odd, second, far}},
      {far, {far}}};
  return all;
}

TEST_P(LinesTest, StridedEqualsThePlainLoop) {
  constexpr int64_t kLength = 300; // more than a block
  const int64_t size = size_of(dtypes_.stored);
  for (const auto& strides : all_strides()) {
    std::vector<std::vector<char>> memory;
    std::vector<Line> lines;
    std::vector<const char*> values;
    std::vector<int64_t> steps;
    for (size_t k = 0; k < 5; ++k) {
      const auto dtype = dtypes_.dtype(static_cast<int64_t>(k));
      const auto stride = strides.values[k % strides.values.size()];
      steps.push_back(stride(size_of(dtype)));
      // One byte off, as no element has to be aligned.
      auto& bytes = memory.emplace_back(steps[k] * kLength + 17);
      for (int64_t i = 0; i < kLength; ++i) {
        fill(random_, dtype, bytes.data() + 1 + i * steps[k], 1, false);
      }
      lines.push_back({bytes.data() + 1, steps[k]});
      values.push_back(lines[k].data);
    }
    const int64_t stored_step = strides.stored(size);
    Memory before(kLength * stored_step, 0);
    for (int64_t i = 0; i < kLength; ++i) {
      fill(random_, dtypes_.stored, before.data() + i * stored_step, 1, false);
    }
    for (const auto& rule : rules_of(dtypes_)) {
      const auto expected = plain_sums(
          dtypes_, rule, lines, {before.data(), stored_step}, kLength);
      for (const int64_t length : {0, 1, 8, 17, 255, 256, 257, 300}) {
        for (int64_t n = 1; n <= 5; ++n) {
          auto call = call_of(rule, n);
          call.values = values.data();
          call.strides = steps.data();
          call.stored_stride = stored_step;
          call.num_elements = length;
          for (const auto& level : levels()) {
            std::vector<char> right(
                before.data(), before.data() + kLength * stored_step);
            Memory stored(kLength * stored_step, 0);
            std::copy(right.begin(), right.end(), stored.data());
            call.stored = stored.data();
            level.function(call);
            // In one order, so that gaps are compared, too.
            for (int64_t i = 0; i < length; ++i) {
              char* now = stored.data() + i * stored_step;
              const char* sum = expected[n - 1].data() + i * size;
              ASSERT_EQ(first_difference(dtypes_.stored, now, sum, 1), -1)
                  << level.name << ", stored stride " << stored_step
                  << ", element " << i << " of " << length << ", " << n
                  << " values";
              std::memcpy(right.data() + i * stored_step, now, size);
            }
            ASSERT_TRUE(std::equal(right.begin(), right.end(), stored.data()))
                << level.name << " wrote between or behind the elements";
            ASSERT_TRUE(stored.guards_are_whole()) << level.name;
          }
        }
      }
    }
  }
}

// Whatever the bits: all compiled for one processor agree with the clones, and
// these with the plain loop.
TEST_P(LinesTest, RandomBits) {
  constexpr int64_t kLength = 3001;
  const int64_t size = size_of(dtypes_.stored);
  std::vector<Memory> memory;
  std::vector<Line> lines;
  std::vector<const char*> values;
  memory.reserve(3);
  for (int64_t k = 0; k < 3; ++k) {
    const auto dtype = dtypes_.dtype(k);
    memory.emplace_back(kLength * size_of(dtype), 0);
    fill(random_, dtype, memory[k].data(), kLength, /*all_bits=*/true);
    lines.push_back({memory[k].data(), size_of(dtype)});
    values.push_back(memory[k].data());
  }
  Memory before(kLength * size, 0);
  fill(random_, dtypes_.stored, before.data(), kLength, /*all_bits=*/true);
  for (const auto& rule : rules_of(dtypes_)) {
    const auto expected =
        plain_sums(dtypes_, rule, lines, {before.data(), size}, kLength);
    for (int64_t n = 1; n <= 3; ++n) {
      for (const auto& level : levels()) {
        Memory stored(kLength * size, 0);
        std::memcpy(stored.data(), before.data(), kLength * size);
        auto call = call_of(rule, n);
        call.values = values.data();
        call.stored = stored.data();
        call.num_elements = kLength;
        level.function(call);
        ASSERT_EQ(
            first_difference(
                dtypes_.stored, stored.data(), expected[n - 1].data(), kLength),
            -1)
            << level.name << ", " << n << " values";
      }
    }
  }
}

// A value may be the stored one itself, in any place of the list.
TEST_P(LinesTest, TheStoredValueAsAValue) {
  constexpr int64_t kLength = 1001;
  if (!dtypes_.is_uniform()) {
    return;
  }
  const int64_t size = size_of(dtypes_.stored);
  Memory before(kLength * size, 0);
  Memory other(kLength * size, 0);
  fill(random_, dtypes_.stored, before.data(), kLength, false);
  fill(random_, dtypes_.stored, other.data(), kLength, false);
  for (const auto& rule : rules_of(dtypes_)) {
    for (const int own : {0, 1, 2}) {
      std::vector<Line> lines(3, {other.data(), size});
      lines[own].data = before.data();
      const auto expected =
          plain_sums(dtypes_, rule, lines, {before.data(), size}, kLength);
      for (int64_t n = own + 1; n <= 3; ++n) {
        for (const auto& level : levels()) {
          for (const bool stream : {false, true}) {
            Memory stored(kLength * size, size);
            std::memcpy(stored.data(), before.data(), kLength * size);
            std::vector<const char*> values(3, other.data());
            values[own] = stored.data();
            auto call = call_of(rule, n);
            call.values = values.data();
            call.stored = stored.data();
            call.num_elements = kLength;
            call.stream = stream;
            level.function(call);
            ASSERT_EQ(
                first_difference(
                    dtypes_.stored,
                    stored.data(),
                    expected[n - 1].data(),
                    kLength),
                -1)
                << level.name << ", place " << own << " of " << n;
            ASSERT_TRUE(stored.guards_are_whole());
          }
        }
      }
    }
  }
}

std::vector<Case> uniform_cases() {
  std::vector<Case> cases;
  const auto add_all = [&](std::vector<ScalarType> dtypes, ScalarType sum) {
    for (const auto dtype : dtypes) {
      cases.push_back({{dtype}, dtype, sum});
    }
  };
  add_all(
      {at::kFloat,
       at::kHalf,
       at::kBFloat16,
       at::kFloat8_e4m3fn,
       at::kFloat8_e4m3fnuz,
       at::kFloat8_e5m2,
       at::kFloat8_e5m2fnuz,
       at::kFloat8_e8m0fnu},
      at::kFloat);
  add_all({at::kDouble}, at::kDouble);
  add_all({at::kComplexHalf, at::kComplexFloat}, at::kComplexFloat);
  add_all({at::kComplexDouble}, at::kComplexDouble);
  add_all({at::kBool}, at::kBool);
  for (const auto dtype :
       {at::kChar, at::kByte, at::kShort, at::kInt, at::kLong}) {
    add_all({dtype}, dtype);
  }
  add_all({at::kUInt16, at::kUInt32, at::kUInt64}, at::kLong);
  return cases;
}

std::vector<Case> mixed_cases() {
  return {
      {{at::kFloat}, at::kHalf, at::kFloat},
      {{at::kHalf}, at::kFloat, at::kFloat},
      {{at::kFloat}, at::kBFloat16, at::kFloat},
      {{at::kBFloat16, at::kFloat, at::kLong}, at::kFloat, at::kFloat},
      {{at::kHalf, at::kBFloat16}, at::kHalf, at::kFloat},
      {{at::kFloat8_e5m2, at::kHalf}, at::kBFloat16, at::kFloat},
      {{at::kBool, at::kShort}, at::kHalf, at::kFloat},
      {{at::kDouble}, at::kHalf, at::kDouble},
      {{at::kDouble, at::kFloat}, at::kFloat, at::kDouble},
      {{at::kFloat}, at::kDouble, at::kDouble},
      {{at::kFloat, at::kComplexFloat, at::kHalf},
       at::kComplexFloat,
       at::kComplexFloat},
      {{at::kDouble, at::kComplexHalf}, at::kComplexFloat, at::kComplexDouble},
      {{at::kChar, at::kShort, at::kLong}, at::kLong, at::kLong},
      {{at::kLong, at::kInt, at::kByte}, at::kChar, at::kLong},
      {{at::kBool}, at::kInt, at::kInt},
      {{at::kByte, at::kUInt16, at::kUInt32}, at::kUInt64, at::kLong},
      {{at::kUInt64, at::kChar}, at::kUInt16, at::kLong},
  };
}

std::string test_name(const ::testing::TestParamInfo<Case>& info) {
  return name_of(info.param);
}

INSTANTIATE_TEST_SUITE_P(
    OneDtype,
    LinesTest,
    ::testing::ValuesIn(uniform_cases()),
    test_name);
INSTANTIATE_TEST_SUITE_P(
    SeveralDtypes,
    LinesTest,
    ::testing::ValuesIn(mixed_cases()),
    test_name);

// One sum of dense lines of one dtype, by the clones.
template <typename T>
std::vector<T> sum(
    ScalarType dtype,
    ScalarType accumulation,
    const std::vector<std::vector<T>>& values,
    std::vector<T> stored,
    const RuleSpec& rule) {
  const std::vector<ScalarType> dtypes(values.size(), dtype);
  std::vector<const char*> data;
  data.reserve(values.size());
  for (const auto& value : values) {
    data.push_back(reinterpret_cast<const char*>(value.data()));
  }
  const RuleStep step{rule};
  const kernels::cpu::SumLine line(
      dtypes, dtype, accumulation, step, kernels::cpu::SumLine::Layout::kDense);
  line.dense(
      data.data(),
      reinterpret_cast<char*>(stored.data()),
      {},
      static_cast<int64_t>(stored.size()),
      /*stream=*/false);
  return stored;
}

// Numbers that one can follow by hand, against a mistake that both the kernels
// and the plain loop above make.
TEST(LineValuesTest, KnownSums) {
  const RuleSpec assign;
  using Floats = std::vector<float>;
  EXPECT_EQ(
      sum<float>(at::kFloat, at::kFloat, {{1e8F}, {1}, {-1e8F}}, {9}, assign),
      Floats{0}); // left to right: the 1 is lost
  EXPECT_EQ(
      sum<float>(at::kFloat, at::kFloat, {{1e8F}, {-1e8F}, {1}}, {9}, assign),
      Floats{1});
  using Halves = std::vector<c10::Half>;
  EXPECT_EQ( // to nearest, ties to even: 2049 -> 2048, 2051 -> 2052
      sum<c10::Half>(
          at::kHalf, at::kFloat, {{2048, 2050}, {1, 1}}, {9, 9}, assign),
      (Halves{2048, 2052}));
  EXPECT_EQ( // rounded once: 60000 + 60000 is no infinity on the way
      sum<c10::Half>(
          at::kHalf, at::kFloat, {{60000}, {60000}, {-60000}}, {9}, assign),
      Halves{60000});
  using Bytes = std::vector<int8_t>;
  EXPECT_EQ(
      sum<int8_t>(at::kChar, at::kChar, {{100}, {100}}, {9}, assign),
      Bytes{-56});
}

TEST(LineValuesTest, KnownSteps) {
  using Floats = std::vector<float>;
  EXPECT_EQ(
      sum<float>(at::kFloat, at::kFloat, {{1}, {3}}, {10}, sgd(0.5, 0)),
      Floats{8});
  EXPECT_EQ( // 10 - 0.5 * (4 + 0.25 * 10)
      sum<float>(at::kFloat, at::kFloat, {{1}, {3}}, {10}, sgd(0.5, 0.25)),
      Floats{6.75});
  EXPECT_EQ(
      sum<float>(at::kFloat, at::kFloat, {{1}}, {INFINITY}, sgd(0.5, 0)),
      Floats{INFINITY}); // no 0 * inf
  using Complex = c10::complex<float>;
  EXPECT_EQ(
      sum<Complex>(
          at::kComplexFloat,
          at::kComplexFloat,
          {{Complex(2, -4)}},
          {Complex(10, 20)},
          sgd(0.5, 0.25)),
      std::vector<Complex>{Complex(7.75, 19.5)});
}

// --- Copies

TEST(CopyLineTest, EveryLengthAndAlignment) {
  std::mt19937_64 random(0);
  constexpr int64_t kBytes = 9001;
  Memory source(kBytes, 5);
  fill(random, at::kByte, source.data(), kBytes, /*all_bits=*/true);
  for (const int64_t num_bytes :
       {0, 1, 63, 64, 65, 127, 128, 2047, 2048, 2049, 4096, 9001}) {
    for (size_t num_outs = 1; num_outs <= 4; ++num_outs) {
      for (const bool stream : {false, true}) {
        std::vector<Memory> memory;
        std::vector<char*> outs;
        memory.reserve(num_outs);
        for (size_t k = 0; k < num_outs; ++k) {
          memory.emplace_back(num_bytes, static_cast<int64_t>(k * 13 % 64));
          outs.push_back(memory[k].data());
        }
        kernels::cpu::copy_line(source.data(), outs, num_bytes, stream);
        kernels::cpu::end_stream();
        for (auto& out : memory) {
          EXPECT_TRUE(
              std::equal(out.data(), out.data() + num_bytes, source.data()))
              << num_bytes << " bytes into " << num_outs;
          EXPECT_TRUE(out.guards_are_whole());
        }
      }
    }
  }
}

TEST(CopyLineTest, OntoItself) {
  std::mt19937_64 random(0);
  constexpr int64_t kBytes = 5001;
  for (const bool stream : {false, true}) {
    Memory source(kBytes, 0);
    fill(random, at::kByte, source.data(), kBytes, /*all_bits=*/true);
    Memory out(kBytes, 0);
    const std::vector<char> before(source.data(), source.data() + kBytes);
    kernels::cpu::copy_line(
        source.data(), {source.data(), out.data()}, kBytes, stream);
    kernels::cpu::end_stream();
    EXPECT_TRUE(std::equal(before.begin(), before.end(), source.data()));
    EXPECT_TRUE(std::equal(before.begin(), before.end(), out.data()));
  }
}

} // namespace
} // namespace torchkv

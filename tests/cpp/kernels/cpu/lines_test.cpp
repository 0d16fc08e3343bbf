// Lines: the bits of a plain loop, for every dtype, length, alignment, stride
// and instruction set. NaNs compare equal.
#include "kernels/cpu/lines.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "lines_levels.h"
#include "plain_lines.h"

namespace torchkv {
namespace {

using c10::ScalarType;
using testing::Case;
using testing::first_difference;
using testing::levels;
using testing::Line;
using testing::LineCall;
using testing::Memory;
using testing::plain_sums;
using testing::size_of;

constexpr int64_t kMaxValues = 9;
constexpr int64_t kMaxLength = 5000;
// Around the unrolling and the block size of the kernels and the cache line.
constexpr int64_t kLengths[] = {0,   1,   7,   8,   15,  16,   17,
                                31,  32,  33,  63,  64,  65,   127,
                                128, 129, 255, 256, 257, 1000, kMaxLength};

// --- Every dtype

RuleSpec sgd(double lr, double weight_decay) {
  return {RuleSpec::Id::kSgd, lr, weight_decay};
}

// ASSIGN for all dtypes, SGD for those that it supports.
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
  LineCall call_of(const RuleSpec& rule, int64_t num_values) {
    value_dtypes_.clear();
    for (int64_t k = 0; k < num_values; ++k) {
      value_dtypes_.push_back(dtypes_.dtype(k));
    }
    LineCall call;
    call.dtypes = value_dtypes_.data();
    call.num_values = num_values;
    call.stored_dtype = dtypes_.stored;
    call.accumulation = dtypes_.accumulation;
    call.step.rule = rule;
    return call;
  }

  Memory random_line(ScalarType dtype, int64_t length, int64_t offset = 0) {
    Memory memory(length * size_of(dtype), offset);
    testing::fill(random_, dtype, memory.data(), length, all_bits_);
    return memory;
  }

  // Runs a dense call for every instruction set, streamed and not; it must turn
  // `before` into `expected` and write nothing else.
  void expect_dense(
      LineCall call,
      Memory& stored,
      Memory& before,
      const std::vector<std::vector<char>>& expected) {
    call.stored = stored.data();
    for (const auto& level : levels()) {
      for (const bool stream : {false, true}) {
        SCOPED_TRACE(
            ::testing::Message()
            << level.name << (stream ? ", streamed, " : ", ") << call.num_values
            << " values of " << call.num_elements << " elements, rule "
            << static_cast<int>(call.step.rule.id) << " with weight decay "
            << call.step.rule.weight_decay);
        std::memcpy(call.stored, before.data(), call.num_elements * size_);
        call.stream = stream;
        level.function(call);
        ASSERT_EQ(
            first_difference(
                dtypes_.stored,
                call.stored,
                expected[call.num_values - 1].data(),
                call.num_elements),
            -1);
        ASSERT_TRUE(stored.guards_are_intact());
      }
    }
  }

  const Case& dtypes_ = GetParam();
  const int64_t size_ = size_of(dtypes_.stored);
  std::mt19937_64 random_{0};
  bool all_bits_ = false;

 private:
  std::vector<ScalarType> value_dtypes_;
};

// Where lines begin, as an offset from a multiple of 64 bytes.
struct Placing {
  const char* name;
  int64_t (*value)(int64_t k, int64_t size);
  int64_t (*stored)(int64_t size);
};

const Placing kPlacings[] = {
    {"aligned",
     [](int64_t, int64_t) -> int64_t { return 0; },
     [](int64_t) -> int64_t { return 0; }},
    {"one element off",
     [](int64_t, int64_t size) { return size; },
     [](int64_t size) { return size; }},
    {"different odd offsets",
     [](int64_t k, int64_t) { return (5 * k + 1) % 64; },
     [](int64_t) -> int64_t { return 3; }}};

TEST_P(LinesTest, DenseEqualsThePlainLoop) {
  for (const auto& placing : kPlacings) {
    SCOPED_TRACE(placing.name);
    std::vector<Memory> memory;
    std::vector<Line> lines;
    std::vector<const char*> values;
    for (int64_t k = 0; k < kMaxValues; ++k) {
      const auto dtype = dtypes_.dtype(k);
      memory.push_back(
          random_line(dtype, kMaxLength, placing.value(k, size_of(dtype))));
      values.push_back(memory[k].data());
      lines.push_back({values[k], size_of(dtype)});
    }
    Memory before = random_line(dtypes_.stored, kMaxLength);
    for (const auto& rule : rules_of(dtypes_)) {
      const auto expected =
          plain_sums(dtypes_, rule, lines, {before.data(), size_}, kMaxLength);
      for (const int64_t length : kLengths) {
        Memory stored(length * size_, placing.stored(size_));
        for (int64_t n = 1; n <= kMaxValues; ++n) {
          auto call = call_of(rule, n);
          call.values = values.data();
          call.num_elements = length;
          expect_dense(call, stored, before, expected);
          if (HasFatalFailure()) {
            return;
          }
        }
      }
    }
  }
}

TEST_P(LinesTest, RandomBits) {
  constexpr int64_t kLength = 3001;
  all_bits_ = true;
  std::vector<Memory> memory;
  std::vector<Line> lines;
  std::vector<const char*> values;
  for (int64_t k = 0; k < 3; ++k) {
    memory.push_back(random_line(dtypes_.dtype(k), kLength));
    values.push_back(memory[k].data());
    lines.push_back({values[k], size_of(dtypes_.dtype(k))});
  }
  Memory before = random_line(dtypes_.stored, kLength);
  Memory stored(kLength * size_, 0);
  for (const auto& rule : rules_of(dtypes_)) {
    const auto expected =
        plain_sums(dtypes_, rule, lines, {before.data(), size_}, kLength);
    for (int64_t n = 1; n <= 3; ++n) {
      auto call = call_of(rule, n);
      call.values = values.data();
      call.num_elements = kLength;
      expect_dense(call, stored, before, expected);
    }
  }
}

// A value may be the stored one itself, at any position of the list.
TEST_P(LinesTest, TheStoredValueAsAValue) {
  constexpr int64_t kLength = 1001;
  if (!dtypes_.is_uniform()) {
    return;
  }
  Memory before = random_line(dtypes_.stored, kLength);
  Memory other = random_line(dtypes_.stored, kLength);
  Memory stored(kLength * size_, size_);
  for (const auto& rule : rules_of(dtypes_)) {
    for (const int own : {0, 1, 2}) {
      std::vector<Line> lines(3, {other.data(), size_});
      lines[own].data = before.data();
      const auto expected =
          plain_sums(dtypes_, rule, lines, {before.data(), size_}, kLength);
      std::vector<const char*> values(3, other.data());
      values[own] = stored.data();
      for (int64_t n = own + 1; n <= 3; ++n) {
        auto call = call_of(rule, n);
        call.values = values.data();
        call.num_elements = kLength;
        expect_dense(call, stored, before, expected);
      }
    }
  }
}

// Strides in bytes. The values take them in turn.
using Stride = int64_t (*)(int64_t size);
const Stride kRepeated = [](int64_t) -> int64_t { return 0; };
const Stride kDense = [](int64_t size) { return size; };
const Stride kSecond = [](int64_t size) { return 2 * size; };
const Stride kOdd = [](int64_t size) { return 3 * size + 1; };
const Stride kFar = [](int64_t size) { return 100 * size; };

struct Strides {
  Stride stored;
  std::vector<Stride> values;
};

const std::vector<Strides>& all_strides() {
  static const std::vector<Strides> all{
      {kDense, {kDense}},
      {kDense, {kRepeated, kDense}},
      {kDense, {kDense, kRepeated, kSecond}},
      {kDense, {kFar, kOdd}},
      {kSecond, {kDense}},
      {kOdd, {kDense, kRepeated, kOdd, kSecond, kFar}},
      {kFar, {kFar}}};
  return all;
}

TEST_P(LinesTest, StridedEqualsThePlainLoop) {
  constexpr int64_t kLength = 300; // more than a block
  constexpr int64_t kValues = 5;
  for (const auto& strides : all_strides()) {
    std::vector<Memory> memory;
    std::vector<Line> lines;
    std::vector<const char*> values;
    std::vector<int64_t> steps;
    const auto strided_line =
        [&](ScalarType dtype, int64_t step, int64_t offset) {
          Memory line(kLength * step + size_of(dtype), offset);
          for (int64_t i = 0; i < kLength; ++i) {
            testing::fill(random_, dtype, line.data() + i * step, 1, all_bits_);
          }
          return line;
        };
    for (int64_t k = 0; k < kValues; ++k) {
      const auto dtype = dtypes_.dtype(k);
      steps.push_back(
          strides.values[k % strides.values.size()](size_of(dtype)));
      // One byte off: elements need no alignment.
      memory.push_back(strided_line(dtype, steps[k], 1));
      values.push_back(memory[k].data());
      lines.push_back({values[k], steps[k]});
    }
    const int64_t step = strides.stored(size_);
    const int64_t num_bytes = kLength * step + size_;
    Memory before = strided_line(dtypes_.stored, step, 0);
    for (const auto& rule : rules_of(dtypes_)) {
      const auto expected =
          plain_sums(dtypes_, rule, lines, {before.data(), step}, kLength);
      for (const int64_t length : {0, 1, 8, 17, 255, 256, 257, 300}) {
        for (int64_t n = 1; n <= kValues; ++n) {
          auto call = call_of(rule, n);
          call.values = values.data();
          call.strides = steps.data();
          call.stored_stride = step;
          call.num_elements = length;
          for (const auto& level : levels()) {
            Memory stored = before;
            call.stored = stored.data();
            level.function(call);
            for (int64_t i = 0; i < length; ++i) {
              const char* sum = expected[n - 1].data() + i * size_;
              char* element = stored.data() + i * step;
              ASSERT_EQ(first_difference(dtypes_.stored, element, sum, 1), -1)
                  << level.name << ", stored stride " << step << ", element "
                  << i << " of " << length << ", " << n << " values";
              // Everything else must be unchanged, including gaps.
              std::memcpy(element, before.data() + i * step, size_);
            }
            ASSERT_EQ(std::memcmp(stored.data(), before.data(), num_bytes), 0)
                << level.name << " wrote between the elements";
            ASSERT_TRUE(stored.guards_are_intact()) << level.name;
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
  return testing::name_of(info.param);
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

// One sum of dense lines of one dtype.
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

// Sums that can be checked by hand, in case the kernels and the plain loop
// above have the same bug.
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
  EXPECT_EQ( // rounded once: 60000 + 60000 does not overflow
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

} // namespace
} // namespace torchkv

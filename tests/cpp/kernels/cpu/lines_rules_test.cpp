// Rules on lines: the bits of a plain loop over the formulas, for every option,
// state, dtype, alignment and instruction set. NaNs compare equal.
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cpu/lines.h"
#include "lines_levels.h"
#include "plain_rules.h"
#include "rule_cases.h"

namespace torchkv {
namespace {

using kernels::RuleNumbers;
using testing::levels;
using testing::LineCall;
using testing::plain_rule;
using testing::RuleCase;
using testing::steps_of;

// Around the vector size and the block size of 256 elements.
constexpr int64_t kRuleLengths[] = {0, 1, 7, 17, 255, 256, 257, 1001};
constexpr int64_t kMaxRuleLength = 1001;

// The numbers of a line at some offset in its memory.
template <typename T>
struct Numbers {
  std::vector<T> memory;
  int64_t offset = 0;

  Numbers() = default;
  Numbers(int64_t size, int64_t offset_) : memory(size + 80), offset(offset_) {}
  T* data() {
    return memory.data() + offset;
  }
  char* bytes() {
    return reinterpret_cast<char*>(data());
  }
};

template <typename T>
bool same_bits(const Numbers<T>& a, const Numbers<T>& b) {
  for (size_t i = 0; i < a.memory.size(); ++i) {
    if (std::memcmp(&a.memory[i], &b.memory[i], sizeof(T)) != 0 &&
        !(std::isnan(static_cast<double>(a.memory[i])) &&
          std::isnan(static_cast<double>(b.memory[i])))) {
      return false;
    }
  }
  return a.memory.size() == b.memory.size();
}

template <typename T>
void fill(std::mt19937_64& random, Numbers<T>& numbers, bool positive) {
  constexpr double kSpecial[] = {
      INFINITY, -INFINITY, NAN, -0.0, 0.0, 1e-310, -1e-42, 3.3e38, -1e300};
  for (auto& number : numbers.memory) {
    const double mantissa = std::uniform_real_distribution(-1., 1.)(random);
    double value = std::ldexp(mantissa, static_cast<int>(random() % 12) - 6);
    if (random() % 16 == 0) {
      value = kSpecial[random() % std::size(kSpecial)];
    }
    number = static_cast<T>(positive ? std::abs(value) : value);
  }
}

// A line of a stored value with its gradients and state. `storage_t` is a real
// type; a complex line is one of pairs.
template <typename storage_t>
struct RuleLine {
  using real_t = at::opmath_type<storage_t>;
  static constexpr bool kHasMaster = !std::is_same_v<storage_t, real_t>;

  RuleLine(
      std::mt19937_64& random,
      const RuleSpec& rule,
      int64_t length,
      int64_t offset,
      bool is_complex) {
    // State is aligned to its dtype; values need not be.
    const int64_t unit = is_complex ? 2 : 1;
    for (auto* numbers : {&gradients[0], &gradients[1], &stored}) {
      *numbers = Numbers<storage_t>(length, offset);
      fill(random, *numbers, /*positive=*/false);
    }
    const auto names = state_names(rule);
    for (size_t k = 0; k < kMaxStates; ++k) {
      if (names[k] != nullptr) {
        states[k] = Numbers<real_t>(length, (offset + 3 * k) % 32 * unit);
        // Averages of squares must not be negative.
        const std::set<std::string> not_squares{
            "exp_avg",
            "momentum_buffer",
            "grad_avg",
            "mom",
            "mean",
            "delta",
            "g",
            "z",
            "previous_weight"};
        const bool is_average = not_squares.count(names[k]) != 0;
        fill(random, states[k], /*positive=*/!is_average);
      }
    }
    if (kHasMaster) {
      master = Numbers<real_t>(length, offset * unit);
      fill(random, master, /*positive=*/false);
    }
  }

  std::array<real_t*, kMaxStates> state_data() {
    std::array<real_t*, kMaxStates> data{};
    for (size_t k = 0; k < kMaxStates; ++k) {
      data[k] = states[k].memory.empty() ? nullptr : states[k].data();
    }
    return data;
  }
  LineCall call(const RuleStep& step, int64_t num_elements, bool is_complex) {
    LineCall result;
    result.step = step;
    result.stored_dtype = c10::CppTypeToScalarType<storage_t>::value;
    if (is_complex) {
      result.stored_dtype = c10::toComplexType(result.stored_dtype);
    }
    result.accumulation = at::toOpMathType(result.stored_dtype);
    dtypes = {result.stored_dtype, result.stored_dtype};
    values = {gradients[0].bytes(), gradients[1].bytes()};
    result.dtypes = dtypes.data();
    result.values = values.data();
    result.num_values = num_values;
    result.stored = stored.bytes();
    result.num_elements = num_elements;
    if (kHasMaster) {
      result.state.master = master.bytes();
    }
    result.state.follows_writes = follows_writes;
    const auto data = state_data();
    for (size_t k = 0; k < kMaxStates; ++k) {
      result.state.states[k] = reinterpret_cast<char*>(data[k]);
    }
    return result;
  }

  // Each second number is as the step before left it.
  void follow_writes() {
    follows_writes = kHasMaster;
    for (size_t i = 0; i < master.memory.size() && i < stored.memory.size();
         i += 2) {
      stored.memory[i] = static_cast<storage_t>(master.memory[i]);
    }
  }

  real_t& weight(int64_t i) {
    if constexpr (kHasMaster) {
      return master.data()[i];
    } else {
      return stored.data()[i];
    }
  }
  // The sum of the gradients as the rule sees it.
  real_t gradient(const RuleStep& step, int64_t i) {
    auto g = static_cast<real_t>(gradients[0].data()[i]);
    g = num_values == 1 ? g : g + static_cast<real_t>(gradients[1].data()[i]);
    g *= static_cast<real_t>(step.scale);
    if (step.clip_value != 0 && !std::isnan(g)) {
      const auto limit = static_cast<real_t>(step.clip_value);
      g = std::clamp(g, -limit, limit);
    }
    return g *
        static_cast<real_t>(
               step.rule.maximize ? -step.last_scale : step.last_scale);
  }
  void plain_update(const RuleStep& step, int64_t count) {
    const RuleNumbers<real_t> n(step);
    const auto data = state_data();
    for (int64_t i = 0; i < count; ++i) {
      const auto written = static_cast<real_t>(stored.data()[i]);
      const auto rounded = static_cast<storage_t>(weight(i));
      if (follows_writes && static_cast<real_t>(rounded) != written) {
        weight(i) = written;
      }
      weight(i) =
          plain_rule(step, n, weight(i), gradient(step, i), data.data(), i);
    }
    if (!is_lamb(step.rule)) {
      round(count);
    }
  }
  void round(int64_t count) {
    if constexpr (kHasMaster) {
      for (int64_t i = 0; i < count; ++i) {
        stored.data()[i] = static_cast<storage_t>(master.data()[i]);
      }
    }
  }

  void expect_equals(const RuleLine& other, const std::string& what) const {
    EXPECT_TRUE(same_bits(stored, other.stored)) << what << ": value";
    EXPECT_TRUE(same_bits(master, other.master)) << what << ": master";
    for (size_t k = 0; k < kMaxStates; ++k) {
      EXPECT_TRUE(same_bits(states[k], other.states[k]))
          << what << ": state " << k;
    }
    EXPECT_TRUE(same_bits(gradients[0], other.gradients[0])) << what;
    EXPECT_TRUE(same_bits(gradients[1], other.gradients[1])) << what;
  }

  std::array<Numbers<storage_t>, 2> gradients;
  size_t num_values = 2; // of the gradients
  Numbers<storage_t> stored;
  Numbers<real_t> master;
  std::array<Numbers<real_t>, kMaxStates> states;
  bool follows_writes = false;
  std::array<c10::ScalarType, 2> dtypes{};
  std::array<const char*, 2> values{};
};

class LineRulesTest : public ::testing::TestWithParam<RuleCase> {
 protected:
  template <typename storage_t>
  void dense_equals_the_plain_loop() {
    using line_t = RuleLine<storage_t>;
    for (const bool is_complex : {false, true}) {
      if (is_complex && std::is_same_v<storage_t, c10::BFloat16>) {
        continue; // no such dtype
      }
      for (const auto& step : steps_of(GetParam().rule)) {
        for (const int64_t length : kRuleLengths) {
          for (const int64_t offset : {0, 1, 5}) {
            const int64_t count = is_complex ? length / 2 * 2 : length;
            line_t before(
                random_, step.rule, kMaxRuleLength, offset, is_complex);
            if ((length + offset) % 2 == 0) {
              before.follow_writes();
            }
            before.num_values = 1 + random_() % 2; // one is not copied
            line_t expected = before;
            expected.plain_update(step, count);
            if (is_lamb(step.rule) && line_t::kHasMaster) {
              expected.round(count); // the first pass stores the old weights
            }
            for (const auto& level : levels()) {
              line_t actual = before;
              auto call =
                  actual.call(step, is_complex ? count / 2 : count, is_complex);
              call.stream = length % 2 == 0;
              level.function(call);
              actual.expect_equals(
                  expected,
                  std::string(level.name) + ", " +
                      c10::toString(call.stored_dtype) + ", length " +
                      std::to_string(length) + ", offset " +
                      std::to_string(offset) + ", " +
                      std::to_string(before.num_values) + " values");
              if (HasFailure()) {
                return;
              }
            }
          }
        }
      }
    }
  }

  // Gradients with a stride of two; a dense value and dense state.
  template <typename storage_t>
  void strided_equals_dense() {
    using line_t = RuleLine<storage_t>;
    constexpr int64_t kSize = sizeof(storage_t);
    for (const auto& step : steps_of(GetParam().rule)) {
      const line_t before(random_, step.rule, kMaxRuleLength, 1, false);
      line_t expected = before;
      levels()[0].function(expected.call(step, kMaxRuleLength, false));
      for (const auto& level : levels()) {
        line_t actual = before;
        auto call = actual.call(step, kMaxRuleLength, false);
        std::array<std::vector<storage_t>, 2> apart;
        std::array<const char*, 2> values{};
        for (size_t k = 0; k < 2; ++k) {
          for (int64_t i = 0; i < kMaxRuleLength; ++i) {
            apart[k].push_back(actual.gradients[k].data()[i]);
            apart[k].push_back(storage_t(99));
          }
          values[k] = reinterpret_cast<const char*>(apart[k].data());
        }
        const std::array<int64_t, 2> strides{2 * kSize, 2 * kSize};
        call.values = values.data();
        call.strides = strides.data();
        call.stored_stride = kSize;
        level.function(call);
        actual.expect_equals(expected, level.name);
      }
    }
  }

  // The norm of the gradients as the rule sees them; the same bits from all
  // instruction sets.
  template <typename storage_t>
  void squared_norms() {
    using line_t = RuleLine<storage_t>;
    for (auto step : steps_of(GetParam().rule)) {
      step.last_scale = 1;
      for (const int64_t length : kRuleLengths) {
        line_t line(random_, step.rule, kMaxRuleLength, 1, false);
        for (auto& gradients : line.gradients) {
          for (auto& number : gradients.memory) {
            number = static_cast<storage_t>(
                std::uniform_real_distribution(-2., 2.)(random_));
          }
        }
        const line_t before = line;
        double plain = 0;
        for (int64_t i = 0; i < length; ++i) {
          const double g = line.gradient(step, i);
          plain += g * g;
        }
        std::vector<double> norms;
        for (const auto& level : levels()) {
          auto call = line.call(step, length, false);
          call.what = LineCall::What::kSquaredNorm;
          call.norms = &norms.emplace_back();
          level.function(call);
          EXPECT_EQ(norms.back(), norms[0]) << level.name;
        }
        EXPECT_NEAR(norms[0], plain, 1e-12 * plain) << "length " << length;
        line.expect_equals(before, "a norm changes nothing");
      }
    }
  }

  std::mt19937_64 random_{0};
};

TEST_P(LineRulesTest, DenseEqualsThePlainLoop) {
  dense_equals_the_plain_loop<float>();
  dense_equals_the_plain_loop<double>();
  dense_equals_the_plain_loop<c10::Half>();
  dense_equals_the_plain_loop<c10::BFloat16>();
}

TEST_P(LineRulesTest, StridedEqualsDense) {
  strided_equals_dense<float>();
  strided_equals_dense<double>();
  strided_equals_dense<c10::BFloat16>();
}

TEST_P(LineRulesTest, SquaredNorms) {
  squared_norms<float>();
  squared_norms<double>();
  squared_norms<c10::Half>();
}

INSTANTIATE_TEST_SUITE_P(
    All,
    LineRulesTest,
    ::testing::ValuesIn(testing::rule_cases_that([](const RuleSpec& rule) {
      return !needs_gradient_norm(rule); // but LAMB, in its first pass
    })),
    [](const auto& info) { return info.param.name; });

// --- The second pass of LAMB

template <typename storage_t>
void lamb_is_the_plain_loop(const RuleSpec& rule, bool special) {
  using line_t = RuleLine<storage_t>;
  using real_t = typename line_t::real_t;
  std::mt19937_64 random(0);
  RuleStep step;
  step.rule = rule;
  step.step = 3;
  const RuleNumbers<real_t> n(step);
  for (const int64_t length : kRuleLengths) {
    for (const int64_t offset : {0, 1, 5}) {
      line_t before(random, rule, kMaxRuleLength, offset, false);
      if (!special) {
        std::uniform_real_distribution<double> uniform(0.1, 2);
        for (int64_t i = 0; i < kMaxRuleLength; ++i) {
          before.weight(i) = static_cast<real_t>(uniform(random));
          before.states[0].data()[i] = static_cast<real_t>(uniform(random));
          before.states[1].data()[i] = static_cast<real_t>(uniform(random));
        }
      }
      line_t expected = before;
      const auto states = expected.state_data();
      double weight = 0;
      double direction = 0;
      std::array<double, 2> moving{7, 10};
      const auto rate = static_cast<real_t>(
          rule.lr * norm_ratio(rule, 1, moving[0], moving[1]));
      for (int64_t i = 0; i < length; ++i) {
        real_t& w = expected.weight(i);
        const real_t u =
            kernels::lamb_direction(w, states[0][i], states[1][i], n);
        weight += static_cast<double>(w) * w;
        direction += static_cast<double>(u) * u;
        w = w - rate * u;
      }
      expected.round(length);
      std::array<double, 2> first{};
      for (const auto& level : levels()) {
        SCOPED_TRACE(level.name);
        line_t actual = before;
        auto call = actual.call(step, length, false);
        call.what = LineCall::What::kLambNorms;
        std::array<double, 2> norms{};
        call.norms = norms.data();
        level.function(call);
        if (&level == &levels()[0]) {
          first = norms;
        }
        if (!special) {
          EXPECT_EQ(norms, first);
          EXPECT_NEAR(norms[0], weight, 1e-12 * weight);
          EXPECT_NEAR(norms[1], direction, 1e-12 * direction);
        }
        actual.expect_equals(before, "norms change nothing");
        call.what = LineCall::What::kLambMove;
        call.norms = moving.data();
        level.function(call);
        actual.expect_equals(expected, "the step");
      }
    }
  }
}

TEST(LineLambTest, EqualsThePlainLoop) {
  for (const auto& rule : testing::rule_cases()) {
    if (is_lamb(rule.rule)) {
      for (const bool special : {false, true}) {
        SCOPED_TRACE(rule.name);
        lamb_is_the_plain_loop<float>(rule.rule, special);
        lamb_is_the_plain_loop<double>(rule.rule, special);
        lamb_is_the_plain_loop<c10::Half>(rule.rule, special);
        lamb_is_the_plain_loop<c10::BFloat16>(rule.rule, special);
      }
    }
  }
}

} // namespace
} // namespace torchkv

// The rules by ATen operators match the kernels.
#include "comm/step_with_aten.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "kernels/cpu/sum.h"
#include "optimizer_helpers.h"
#include "state_line.h"

namespace torchkv {
namespace {

using testing::expect_close;

class StepWithAtenTest : public testing::RuleTest {};

TEST_P(StepWithAtenTest, MatchesTheKernels) {
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    // SGLD's random numbers are of fp32, by other formulas.
    const double tolerance = rule_.id == RuleSpec::Id::kMxnetSgld ? 1e-5
        : c10::toRealValueType(dtype) == at::kDouble              ? 1e-12
                                                                  : 1e-6;
    const at::Tensor weight = at::randn({300}, dtype);
    const at::Tensor weight_aten = weight.clone();
    std::array<at::Tensor, kMaxStates> states;
    std::array<at::Tensor, kMaxStates> states_aten;
    const auto names = state_names(rule_);
    for (size_t k = 0; k < kMaxStates; ++k) {
      if (names[k] != nullptr) {
        states[k] = at::full({300}, rule_.initial_accumulator_value, dtype);
        if (dtype == at::kComplexFloat || dtype == at::kComplexDouble) {
          at::view_as_real(states[k]).fill_(rule_.initial_accumulator_value);
        }
        states_aten[k] = states[k].clone();
      }
    }
    for (int t = 1; t <= 5; ++t) {
      RuleStep step;
      step.rule = rule_;
      step.step = t;
      step.is_first = t == 1;
      step.scale = t == 2 ? 0.5 : 1;
      step.clip_value = t >= 3 ? 0.7 : 0;
      step.last_scale = t >= 4 ? 0.25 : 1;
      step.stream = static_cast<uint64_t>(t);
      step = without_norms(step);
      const at::Tensor gradient = at::randn({300}, dtype);
      const Value value(&gradient);
      kernels::cpu::SumBatch batch;
      batch.add({value, weight, dtype, step, testing::state_line(states)});
      const double norm = batch.squared_norm(1);
      EXPECT_NEAR(
          squared_norm_with_aten(step, gradient.clone(), 1).item<double>(),
          norm,
          1e-6 * norm);
      batch.run();
      step_with_aten(step, gradient.clone(), weight_aten, states_aten);
      expect_close(weight_aten, weight, tolerance, c10::toString(dtype));
      for (size_t k = 0; k < kMaxStates; ++k) {
        if (names[k] != nullptr) {
          expect_close(states_aten[k], states[k], tolerance, names[k]);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    StepWithAtenTest,
    ::testing::ValuesIn(testing::rule_cases()),
    testing::rule_name);

TEST(RowsWithAtenTest, CopiesOfRowsAreSteppedAsInTheWhole) {
  for (const auto& [name, rule] : testing::rule_cases()) {
    if (!is_random(rule) && !needs_gradient_norm(rule)) {
      continue;
    }
    for (const auto dtype : {at::kFloat, at::kComplexDouble}) {
      const at::Tensor weight = at::randn({7, 3, 2}, dtype);
      const at::Tensor ids = at::tensor({1, 2, 5}, at::kLong);
      const at::Tensor gradients = at::randn({3, 3, 2}, dtype);
      const at::Tensor gradient =
          at::zeros_like(weight).index_copy_(0, ids, gradients);
      std::array<at::Tensor, kMaxStates> states;
      std::array<at::Tensor, kMaxStates> states_of_rows;
      const auto names = state_names(rule);
      for (size_t i = 0; i < kMaxStates; ++i) {
        if (names[i] != nullptr) {
          states[i] = at::randn_like(weight);
          states_of_rows[i] = states[i].index_select(0, ids);
        }
      }
      RuleStep step;
      step.rule = rule;
      step.stream = 11;
      step = without_norms(step);
      const RowsOfWeight rows{weight.clone(), ids};
      const at::Tensor copies = weight.index_select(0, ids);
      step_with_aten(step, gradient, weight, states);
      step_with_aten(step, gradients, copies, states_of_rows, &rows);
      expect_close(copies, weight.index_select(0, ids), 1e-6, name);
      for (size_t i = 0; i < kMaxStates; ++i) {
        if (names[i] != nullptr) {
          expect_close(
              states_of_rows[i], states[i].index_select(0, ids), 1e-6, name);
        }
      }
    }
  }
}

TEST(NanWithAtenTest, ANanInTheGradientReachesTheWeight) {
  for (const auto& [name, rule] : testing::rule_cases()) {
    at::Tensor weight = at::ones({2});
    std::array<at::Tensor, kMaxStates> states;
    const auto names = state_names(rule);
    for (size_t i = 0; i < kMaxStates; ++i) {
      if (names[i] != nullptr) {
        states[i] = at::zeros({2});
      }
    }
    RuleStep step;
    step.rule = rule;
    step = without_norms(step);
    at::Tensor gradient = at::zeros({2});
    gradient[0] = std::numeric_limits<float>::quiet_NaN();
    step_with_aten(step, gradient, weight, states);
    EXPECT_TRUE(weight[0].isnan().item<bool>()) << name;
    // LBSGD's ratio of the norms is NaN, too.
    EXPECT_EQ(
        weight[1].isnan().item<bool>(),
        rule.id == RuleSpec::Id::kMxnetLbsgd && !is_elementwise(rule))
        << name;
  }
}

} // namespace
} // namespace torchkv

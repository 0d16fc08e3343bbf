// Learning rates that depend on norms.
#include "core/step_rate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace torchkv {
namespace {

RuleStep step_of(const char* rule, NumbersByName numbers, int64_t number = 1) {
  numbers.emplace("lr", 0.5);
  RuleStep step;
  step.rule = make_rule("test", rule, numbers);
  step.step = number;
  return step;
}

TEST(StepRateTest, LambsRatioIsThatOfTheNormsOrOne) {
  const auto ratio = [](double weight, double direction) {
    return norm_ratio(make_rule("test", "lamb", {}), 1, weight, direction);
  };
  EXPECT_EQ(ratio(6, 2), 3);
  EXPECT_EQ(ratio(0, 4), 1);
  EXPECT_EQ(ratio(36, 0), 1);
  EXPECT_EQ(ratio(NAN, 4), 1);
  // Their product is out of range.
  EXPECT_EQ(ratio(1e-300, 1e-300), 1);
  EXPECT_DOUBLE_EQ(ratio(1e150, 1e-150), 1e300);
}

TEST(StepRateTest, MxnetsLambHasBoundsOfTheWeightsNorm) {
  const auto ratio = [](const NumbersByName& bounds, double weight) {
    return norm_ratio(make_rule("test", "mxnet_lamb", bounds), 1, weight, 2);
  };
  EXPECT_EQ(ratio({}, 6), 3);
  EXPECT_EQ(ratio({{"lower_bound", 8}}, 6), 4);
  EXPECT_EQ(ratio({{"lower_bound", 8}}, 0), 4);
  EXPECT_EQ(ratio({{"upper_bound", 4}}, 6), 2);
  EXPECT_EQ(ratio({{"lower_bound", 1}, {"upper_bound", 10}}, 6), 3);
  EXPECT_EQ(ratio({{"lower_bound", 8}}, NAN), 1);
}

TEST(StepRateTest, LarsMultipliesTheRateByTheRatioOfNorms) {
  const NumbersByName numbers{
      {"eta", 0.25}, {"weight_decay", 0.5}, {"eps", 2}, {"momentum", 0.9}};
  NumbersByName uncorrected = numbers;
  uncorrected["momentum_correction"] = 0;
  const double trust = 0.25 * 8 / (0.5 * 8 + 4 + 2);
  const RuleStep sgd =
      scaled_by_norms(step_of("mxnet_lars", uncorrected), 8, 4);
  EXPECT_EQ(sgd.rule.id, RuleSpec::Id::kMxnetSgd);
  EXPECT_EQ(sgd.rule.lr, 0.5 * trust);
  EXPECT_EQ(sgd.rule.momentum, 0.9);
  const RuleStep lars = scaled_by_norms(step_of("mxnet_lars", numbers), 8, 4);
  EXPECT_EQ(lars.rule.id, RuleSpec::Id::kMxnetLars);
  EXPECT_EQ(lars.rule.lr, 0.5);
  EXPECT_EQ(lars.rule.extra2, trust);
  EXPECT_TRUE(is_elementwise(lars.rule));
}

TEST(StepRateTest, LarsHasARatioOf1WhereANormIsNotGreaterThan0) {
  for (const auto& [weight, gradient] :
       {std::pair(0., 4.), {8., 0.}, {NAN, 4.}, {8., NAN}}) {
    const RuleStep step =
        scaled_by_norms(step_of("mxnet_lars", {}), weight, gradient);
    EXPECT_EQ(step.rule.lr, 0.5) << weight << ' ' << gradient;
  }
}

TEST(StepRateTest, LbsgdHasBoundsOfTheRatio) {
  const auto rate = [](double weight, double gradient, double scale = 1) {
    RuleStep step = step_of(
        "mxnet_lbsgd", {{"warmup_strategy", 3}, {"weight_decay", 0.25}});
    step.scale = scale;
    return scaled_by_norms(step, weight, gradient).rule.lr;
  };
  EXPECT_NEAR(rate(4, 3), 0.5 * 4 / std::sqrt(0.25 * 16 + 9), 1e-12);
  // Of the gradient before it is rescaled.
  EXPECT_NEAR(rate(4, 3, 0.5), 0.5 * 4 / std::sqrt(0.25 * 16 + 36), 1e-12);
  EXPECT_EQ(rate(0, 3), 0.5 * 0.01);
  EXPECT_NEAR(rate(1e-3, 0), 0.5 * 2, 1e-6); // of the decay alone
  EXPECT_NEAR(rate(1e300, 1e300), 0.5 / std::sqrt(1.25), 1e-12);
}

TEST(StepRateTest, LbsgdWarmsUpToTheBatchScale) {
  const auto rate = [](double strategy, int64_t number, double updates = 40) {
    return without_norms(step_of(
                             "mxnet_lbsgd",
                             {{"warmup_strategy", strategy},
                              {"batch_scale", 5},
                              {"warmup_updates", updates},
                              {"begin_update", 5}},
                             number))
        .rule.lr;
  };
  // After 5 + 1 * 5 updates of 40, and 5 + 3 * 5.
  const std::vector<std::vector<double>> parts{
      {0.25, 0.5}, {0.0625, 0.25}, {0.5, std::sqrt(0.5)}};
  for (size_t strategy = 0; strategy < parts.size(); ++strategy) {
    const auto number = static_cast<double>(strategy);
    EXPECT_DOUBLE_EQ(rate(number, 1), 0.5 * (1 + 4 * parts[strategy][0]));
    EXPECT_DOUBLE_EQ(rate(number, 3), 0.5 * (1 + 4 * parts[strategy][1]));
    EXPECT_EQ(rate(number, 7), 0.5 * 5);
    EXPECT_EQ(rate(number, 1, 0), 0.5 * 5); // no warm-up
  }
}

TEST(StepRateTest, OtherStepsStayAsTheyAre) {
  for (const char* rule :
       {"sgd", "lamb", "mxnet_sgd", "mxnet_lamb", "mxnet_lars"}) {
    const RuleStep step = step_of(rule, {});
    const RuleStep same = without_norms(step);
    EXPECT_EQ(same.rule.id, step.rule.id);
    EXPECT_EQ(numbers_of(same.rule), numbers_of(step.rule));
  }
  EXPECT_EQ(
      without_norms(step_of("mxnet_lbsgd", {{"warmup_strategy", 3}})).rule.id,
      RuleSpec::Id::kMxnetLbsgd);
  EXPECT_EQ(
      without_norms(step_of("mxnet_lars", {{"eta", 0}})).rule.id,
      RuleSpec::Id::kMxnetSgd);
}

} // namespace
} // namespace torchkv

// Gradient options: what is applied before a rule, and which values are
// invalid.
#include "update/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "error_text.h"
#include "optimizer_helpers.h"
#include "plain_optimizer.h"

namespace torchkv {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using testing::expect_same_state;
using testing::has;
using testing::optimizer;
using testing::PlainOptimizer;
using testing::state_of;
using testing::store_with;
using testing::value_of;

TEST(GradientTest, NumbersRoundTripAndErrors) {
  const NumbersByName numbers{
      {"accumulate", 3},
      {"rescale_grad", -0.5},
      {"clip_value", 2},
      {"max_norm", 4},
      {"skip_nonfinite", 1},
      {"lazy", 0}};
  EXPECT_EQ(numbers_of(make_gradient("test", numbers)), numbers);
  const auto refusal = [](const NumbersByName& gradient) {
    return error_text([&] {
      c10::make_intrusive<KVStore>()->set_optimizer(
          optimizer("sgd", {}, gradient));
    });
  };
  EXPECT_EQ(refusal(numbers), "no error");
  EXPECT_TRUE(has(refusal({{"clip", 1}}), "unknown gradient option 'clip'"));
  for (const double count :
       {0., -1., 2.5, 1e300, double(NAN), double(INFINITY)}) {
    EXPECT_TRUE(has(refusal({{"accumulate", count}}), "accumulate")) << count;
  }
  for (const char* name : {"rescale_grad", "clip_value", "max_norm"}) {
    EXPECT_TRUE(has(refusal({{name, NAN}}), name));
    EXPECT_TRUE(has(refusal({{name, INFINITY}}), name));
  }
  EXPECT_TRUE(has(refusal({{"clip_value", -1}}), "clip_value"));
  EXPECT_TRUE(has(refusal({{"max_norm", -1}}), "max_norm"));
}

TEST(GradientTest, GroupsAndMultipliersAreChecked) {
  const auto refusal = [](const Optimizer& optimizer) {
    return error_text(
        [&] { c10::make_intrusive<KVStore>()->set_optimizer(optimizer); });
  };
  EXPECT_TRUE(has(refusal({}), "at least one parameter group"));
  Optimizer bad = optimizer("sgd", {});
  bad.keys[5] = {1, 1, 1};
  EXPECT_TRUE(has(refusal(bad), "a group less than 1, but got 1 (key 5)"));
  for (const double number : {-1., double(NAN), double(INFINITY)}) {
    bad.keys[5] = {0, number, 1};
    EXPECT_TRUE(has(refusal(bad), "(key 5)"));
    bad.keys[5] = {0, 1, number};
    EXPECT_TRUE(has(refusal(bad), "(key 5)"));
  }
}

TEST(GradientTest, IntegersAreRejected) {
  const auto store = store_with(at::zeros(3, at::kInt), optimizer("adam", {}));
  EXPECT_THROW(store->push(1, at::ones(3, at::kInt)), c10::TypeError);
  expect_equal(value_of(store), at::zeros(3, at::kInt));
  // Other keys of the store may have such dtypes, also in a copy.
  store->init(2, at::zeros(3, at::kUInt16));
  store->init(3, at::zeros(3));
  store->push(3, at::ones(3));
  const auto copy = KVStore::from_state(store->state());
  expect_same_state(state_of(copy, 3), state_of(store, 3));
  EXPECT_THROW(
      store->set_optimizer_states(
          2, {{1, 0, {{"exp_avg", at::ones(3)}, {"exp_avg_sq", at::ones(3)}}}}),
      c10::TypeError);
}

TEST(GradientTest, RescaledThenClipped) {
  const auto store = store_with(
      at::zeros(4),
      optimizer(
          "sgd", {{"lr", 1}}, {{"rescale_grad", 0.5}, {"clip_value", 1}}));
  store->push(1, at::tensor({1.F, 8.F, -8.F, -INFINITY}));
  expect_equal(value_of(store), at::tensor({-0.5F, -1.F, 1.F, 1.F}));
}

TEST(GradientTest, AccumulatedPushesMakeOneStep) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexFloat}) {
    const at::Tensor value = at::ones({65, 17}, dtype);
    const RuleSpec rule = make_rule("test", "adam", {{"lr", 0.1}});
    const auto store = store_with(value, optimizer(rule, {{"accumulate", 3}}));
    PlainOptimizer plain(value);
    for (int t = 0; t < 2; ++t) {
      const at::Tensor before = value_of(store);
      // The value's memory layout, a transposed one, and two replicas.
      const at::Tensor a = at::ones({65, 17}, dtype);
      const at::Tensor b = at::full({17, 65}, 2, dtype).t();
      const at::Tensor c = at::full({65, 17}, -5 - t, dtype);
      store->push(1, a);
      EXPECT_EQ(state_of(store).num_accumulated, 1);
      store->push(1, b);
      expect_equal(value_of(store), before);
      const KeyState state = state_of(store);
      EXPECT_EQ(state.step, t);
      EXPECT_EQ(state.num_accumulated, 2);
      expect_equal(
          state.tensors.at("accumulated"),
          at::full({65, 17}, 3, at::toOpMathType(dtype)));
      // They are copied with the store.
      const auto copy = KVStore::from_state(store->state());
      expect_same_state(state_of(copy), state);
      for (const auto& each : {store, copy}) {
        each->push(1, Tensors::replicas({c, c}));
      }
      expect_equal(value_of(copy), value_of(store));
      plain.step(rule, a + b + c + c);
      EXPECT_EQ(state_of(store).step, t + 1);
      EXPECT_EQ(state_of(store).num_accumulated, 0);
      EXPECT_EQ(state_of(store).tensors.count("accumulated"), 0);
      expect_close(
          value_of(store),
          plain.like(value),
          dtype == at::kBFloat16 ? 1e-2 : 1e-5);
    }
    EXPECT_EQ(store->state().versions, (std::vector<int64_t>{2}));
  }
}

TEST(GradientTest, MaxNormIsThatOfAllKeysTogether) {
  for (const double max_norm : {1., 1e6}) {
    const auto store = c10::make_intrusive<KVStore>();
    const Keys keys{1, 2, 3};
    const std::vector<at::Tensor> gradients{
        at::randn({40000}),
        at::randn({65, 17}).t(),
        at::randn({30}, at::kComplexDouble)};
    store->init(
        keys,
        Tensors::one_each(
            {at::zeros({40000}),
             at::zeros({17, 65}),
             at::zeros({30}, at::kComplexDouble)}));
    store->set_optimizer(
        optimizer("sgd", {{"lr", 1}}, {{"max_norm", max_norm}}));
    double norm = 0;
    for (const auto& gradient : gradients) {
      for (const double number : PlainOptimizer::numbers_of(gradient)) {
        norm += number * number;
      }
    }
    norm = std::sqrt(norm);
    store->push(keys, Tensors::one_each(gradients));
    const double scale = std::min(1., max_norm / (norm + 1e-6));
    for (int64_t key : {1, 2, 3}) {
      expect_close(value_of(store, key), gradients[key - 1].mul(-scale), 1e-6);
    }
  }
}

TEST(GradientTest, MaxNormOfAccumulatedAndClippedGradients) {
  const auto store = store_with(
      at::zeros(2, at::kDouble),
      optimizer(
          "sgd",
          {{"lr", 1}},
          {{"accumulate", 2},
           {"rescale_grad", 0.5},
           {"clip_value", 3},
           {"max_norm", 1}}));
  store->push(1, at::tensor({6., 50.}));
  store->push(1, at::tensor({0., 50.}));
  const double norm = std::sqrt(18.); // of (3, 3), which (3, 50) became
  const double expected = -3 / (norm + 1e-6);
  expect_close(value_of(store), at::full(2, expected, at::kDouble), 1e-12);
}

TEST(GradientTest, ANonfiniteCallMakesNoStep) {
  const auto store = c10::make_intrusive<KVStore>();
  const Keys both{1, 2};
  const at::Tensor zero = at::zeros(3);
  store->init(both, Tensors::one_each({zero, zero}));
  const NumbersByName options{
      {"skip_nonfinite", 1}, {"clip_value", 1}, {"accumulate", 2}};
  store->set_optimizer(optimizer("sgd", {{"lr", 1}}, options));
  const auto push = [&](double a, double b) {
    store->push(both, Tensors::one_each({at::full(3, a), at::full(3, b)}));
  };
  EXPECT_EQ(store->num_skipped(), 0);
  for (const double bad : {double(NAN), double(INFINITY), -double(INFINITY)}) {
    push(1, 1);
    push(0, bad);
  }
  EXPECT_EQ(store->num_skipped(), 3);
  for (int64_t key : {1, 2}) {
    expect_equal(value_of(store, key), zero);
    EXPECT_EQ(state_of(store, key).step, 0);
    EXPECT_EQ(state_of(store, key).num_accumulated, 0); // dropped
  }
  EXPECT_EQ(store->state().versions, (std::vector<int64_t>{0, 0}));
  push(0.25, 0.5);
  push(0.25, 0.5);
  expect_equal(value_of(store, 1), at::full(3, -0.5));
  expect_equal(value_of(store, 2), at::full(3, -1.));
  EXPECT_EQ(store->num_skipped(), 3);
}

// Even if the infinity is in a gradient that would only be accumulated.
TEST(GradientTest, ANonfiniteCallIsNotAccumulated) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init({1, 2}, Tensors::one_each({at::zeros(3), at::zeros(3)}));
  store->set_optimizer(optimizer(
      "sgd", {{"lr", 1}}, {{"skip_nonfinite", 1}, {"accumulate", 2}}));
  store->push(1, at::ones(3));
  store->push({1, 2}, Tensors::one_each({at::ones(3), at::full(3, INFINITY)}));
  EXPECT_EQ(store->num_skipped(), 1);
  expect_equal(value_of(store, 1), at::zeros(3));
  EXPECT_EQ(state_of(store, 1).num_accumulated, 0); // its step was dropped
  EXPECT_EQ(state_of(store, 2).num_accumulated, 0);
  for (int i = 0; i < 2; ++i) {
    store->push(2, at::ones(3));
  }
  expect_equal(value_of(store, 2), at::full(3, -2.));
  EXPECT_EQ(store->num_skipped(), 1);
}

TEST(GradientTest, WithoutSkippingANaNReachesTheValue) {
  const auto store = store_with(
      at::zeros(2), optimizer("sgd", {{"lr", 1}}, {{"max_norm", 1}}));
  store->push(1, at::tensor({NAN, 1.F}));
  EXPECT_TRUE(at::isnan(value_of(store)).all().item<bool>());
  EXPECT_EQ(store->num_skipped(), 0);
}

TEST(GradientTest, AnInfiniteWeightStaysInfiniteWithoutDecay) {
  for (const auto& [name, rule] : testing::rule_cases()) {
    if (rule.weight_decay == 0 && is_elementwise(rule)) {
      const auto store = store_with(at::full(3, INFINITY), optimizer(rule));
      store->push(1, at::ones(3));
      expect_equal(value_of(store), at::full(3, INFINITY));
    }
  }
}

TEST(GradientTest, SumsOfUnsignedIntegersWithoutAnOptimizer) {
  for (const auto dtype : {at::kUInt16, at::kUInt32, at::kUInt64}) {
    const auto store = c10::make_intrusive<KVStore>();
    const at::Tensor value = at::ones(300000, at::kInt).to(dtype);
    store->init(1, value);
    store->push(1, Tensors::replicas({value, value}));
    expect_equal(value_of(store).to(at::kLong), at::full(300000, 2, at::kLong));
  }
}

} // namespace
} // namespace torchkv

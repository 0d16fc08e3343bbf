// Norms of gradients: with squares out of range, and as reported by the store.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "comm/step_with_aten.h"
#include "core/plain_dispatch.h"
#include "kernels/cpu/sum.h"
#include "optimizer_helpers.h"
#include "state_line.h"

namespace torchkv {
namespace {

using testing::expect_close;
using testing::expect_equal;
using testing::optimizer;
using testing::store_with;
using testing::value_of;

at::Tensor doubles(std::vector<double> numbers) {
  return at::tensor(numbers, at::kDouble);
}

TEST(NormTest, SkipsInfiniteGradientsButNotInfiniteSquares) {
  const auto store = store_with(
      at::zeros(2, at::kDouble),
      optimizer("sgd", {{"lr", 1}}, {{"skip_nonfinite", 1}}));
  const at::Tensor large = doubles({3e200, -4e200});
  store->push(1, large);
  expect_equal(value_of(store), -large);
  EXPECT_EQ(store->num_skipped(), 0);
  EXPECT_DOUBLE_EQ(*store->grad_norm(), 5e200);
  for (const double bad : {double(INFINITY), -double(INFINITY), double(NAN)}) {
    store->push(1, doubles({3e200, bad}));
  }
  EXPECT_EQ(store->num_skipped(), 3);
  expect_equal(value_of(store), -large);
  // The norm itself is out of range, the gradient is not.
  store->push(1, doubles({1.5e308, 1.5e308}));
  EXPECT_EQ(store->num_skipped(), 3);
  EXPECT_EQ(*store->grad_norm(), std::numeric_limits<double>::max());
}

TEST(NormTest, ClipsGradientsWithInfiniteSquares) {
  for (const bool complex : {false, true}) {
    const auto number = [&](double real, double imaginary) {
      return complex ? at::complex(doubles({real}), doubles({imaginary}))
                     : doubles({real, imaginary});
    };
    const auto store = store_with(
        number(0, 0), optimizer("sgd", {{"lr", 1}}, {{"max_norm", 10}}));
    store->push(1, number(3e160, -4e160));
    expect_close(value_of(store), number(-6, 8), 1e-12);
  }
}

// The norm itself is out of range.
TEST(NormTest, ClipsGradientsWithAnInfiniteNorm) {
  const auto store = store_with(
      at::zeros(16, at::kDouble),
      optimizer("sgd", {{"lr", 1}}, {{"max_norm", 8}}));
  store->push(1, at::full(16, 1.5e308, at::kDouble));
  EXPECT_EQ(*store->grad_norm(), std::numeric_limits<double>::max());
  expect_close(value_of(store), at::full(16, -2, at::kDouble), 1e-12);
}

// Of all keys together, of any dtype.
TEST(NormTest, CoversSeveralKeysAndDtypes) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(
      {1, 2}, Tensors::one_each({at::zeros(1, at::kDouble), at::zeros(1)}));
  store->set_optimizer(optimizer("sgd", {{"lr", 1}}, {{"max_norm", 1}}));
  store->push(
      {1, 2}, Tensors::one_each({doubles({3e200}), at::full(1, 1e38F)}));
  EXPECT_DOUBLE_EQ(*store->grad_norm(), 3e200);
  expect_close(value_of(store, 1), doubles({-1}), 1e-12);
  store->push({1, 2}, Tensors::one_each({doubles({3}), at::full(1, 4.F)}));
  EXPECT_DOUBLE_EQ(*store->grad_norm(), 5);
}

TEST(NormTest, IsReportedForTheLastStep) {
  const auto store = store_with(at::zeros(2), optimizer("sgd", {{"lr", 1}}));
  EXPECT_EQ(store->grad_norm(), std::nullopt);
  store->push(1, at::ones(2));
  EXPECT_EQ(store->grad_norm(), std::nullopt);
  store->set_optimizer(optimizer(
      "sgd",
      {{"lr", 1}},
      {{"max_norm", 1}, {"accumulate", 2}, {"clip_value", 4}}));
  EXPECT_EQ(store->grad_norm(), std::nullopt);
  store->push(1, at::full(2, 3.F));
  EXPECT_EQ(store->grad_norm(), std::nullopt); // no step yet
  store->push(1, at::full(2, 5.F));
  EXPECT_FLOAT_EQ(*store->grad_norm(), std::sqrt(2. * 16)); // after clip_value
  store->push(1, at::full(2, 1.F));
  EXPECT_FLOAT_EQ(*store->grad_norm(), std::sqrt(2. * 16));
  store->push(1, at::full(2, 1.F));
  EXPECT_FLOAT_EQ(*store->grad_norm(), std::sqrt(2. * 4));
  store->set_optimizer(optimizer("sgd", {{"lr", 1}}), /*keep_state=*/true);
  store->push(1, at::ones(2));
  EXPECT_EQ(store->grad_norm(), std::nullopt);
  store->close();
  EXPECT_THROW(store->grad_norm(), c10::Error);
}

// --- LAMB, whose ratio of norms must not depend on the scale of the weights

void lamb_scales_with_the_weights(double scale, bool with_aten) {
  at::manual_seed(1);
  RuleStep step;
  step.rule = make_rule("test", "lamb", {{"lr", 0.5}, {"eps", 0}});
  const at::Tensor gradient = at::randn({20000}, at::kDouble);
  const at::Tensor plain = at::randn({20000}, at::kDouble);
  const auto stepped = [&](const at::Tensor& from) {
    at::Tensor weight = from.clone();
    const std::array<at::Tensor, kMaxStates> states{
        at::zeros_like(weight), at::zeros_like(weight)};
    if (with_aten) {
      const PlainDispatch below_autograd;
      step_with_aten(step, gradient.clone(), weight, states);
    } else {
      const Value value(&gradient);
      kernels::cpu::SumBatch batch;
      batch.add(
          {value, weight, at::kDouble, step, testing::state_line(states)});
      batch.run();
    }
    return weight;
  };
  expect_close(stepped(plain * scale) / scale, stepped(plain), 1e-10);
}

TEST(NormTest, LambOfHugeAndTinyWeights) {
  for (const bool with_aten : {false, true}) {
    for (const double scale : {1e170, 1e300, 1e-170, 1e-300, 1.}) {
      SCOPED_TRACE(scale);
      lamb_scales_with_the_weights(scale, with_aten);
    }
  }
}

// Other keys of the same call are not affected.
TEST(NormTest, LambOfSeveralKeys) {
  const auto make = [](double large) {
    const auto store = c10::make_intrusive<KVStore>();
    store->init(
        {1, 2, 3},
        Tensors::one_each(
            {doubles({3, 4}), doubles({large, large}), doubles({0, 0})}));
    store->set_optimizer(optimizer("lamb", {{"lr", 0.5}, {"eps", 0}}));
    store->push(
        {1, 2, 3},
        Tensors::one_each(
            {doubles({1, -1}), doubles({1, 1}), doubles({1, 1})}));
    return store;
  };
  const auto store = make(1e200);
  const auto expected = make(1);
  expect_equal(value_of(store, 1), value_of(expected, 1));
  expect_close(value_of(store, 2) / 1e200, value_of(expected, 2), 1e-12);
  expect_equal(value_of(store, 3), value_of(expected, 3));
}

} // namespace
} // namespace torchkv

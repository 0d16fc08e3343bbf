// Built-in optimizers in a store match a plain loop in double, for values and
// gradients of any dtype and layout; and their state.
#include "update/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "optimizer_helpers.h"
#include "plain_optimizer.h"

namespace torchkv {
namespace {

using testing::bytes_of;
using testing::expect_close;
using testing::expect_equal;
using testing::expect_same_state;
using testing::optimizer;
using testing::PlainOptimizer;
using testing::state_of;
using testing::Store;
using testing::store_with;
using testing::value_of;

double tolerance_of(at::ScalarType dtype) {
  return c10::toRealValueType(dtype) == at::kDouble ? 1e-12 : 2e-5;
}

class OptimizerRuleTest : public testing::RuleTest {};

TEST_P(OptimizerRuleTest, MatchesThePlainLoop) {
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    for (const int64_t size : {1, 5, 300, 40000}) {
      const at::Tensor value = at::randn({size}, dtype);
      const auto store = store_with(value, optimizer(rule_));
      PlainOptimizer plain(value);
      for (int i = 0; i < 6; ++i) {
        const at::Tensor a = at::randn({size}, dtype);
        const at::Tensor b = at::randn({size}, dtype);
        store->push(1, Tensors::replicas({a, b}));
        plain.step(rule_, a + b);
      }
      expect_close(
          value_of(store),
          plain.like(value),
          tolerance_of(dtype),
          c10::toString(dtype));
      EXPECT_EQ(state_of(store).step, 6);
    }
  }
}

// Gradients that are transposed, expanded, or lazily conjugated or negated.
TEST_P(OptimizerRuleTest, GradientsOfAnyLayout) {
  for (const auto dtype : {at::kDouble, at::kComplexDouble}) {
    const at::Tensor value = at::randn({70, 33, 3}, dtype);
    const auto store = store_with(value, optimizer(rule_));
    // The state has the value's memory layout, whatever its strides.
    const auto turned = store_with(value.permute({2, 0, 1}), optimizer(rule_));
    PlainOptimizer plain(value);
    const auto push = [&](const at::Tensor& gradient) {
      store->push(1, gradient);
      turned->push(1, gradient.permute({2, 0, 1}));
      plain.step(rule_, gradient);
    };
    push(at::randn({3, 33, 70}, dtype).permute({2, 1, 0}));
    push(at::randn({140, 33, 3}, dtype).slice(0, 1, 140, 2));
    push(at::randn({70, 1, 3}, dtype).expand({70, 33, 3}));
    push(at::randn({33, 70, 3}, dtype).transpose(0, 1));
    if (at::isComplexType(dtype)) {
      push(at::randn({70, 33, 3}, dtype).conj());
      push(at::_conj(at::randn({3, 33, 70}, dtype)).permute({2, 1, 0}));
    } else {
      push(at::_neg_view(at::randn({70, 33, 3}, dtype)));
      push(at::imag(at::conj(at::randn({70, 33, 3}, at::kComplexDouble))));
    }
    push(at::randn({70, 33, 3}, dtype));
    expect_close(value_of(store), plain.like(value), 1e-11);
    expect_close(value_of(turned), plain.like(value).permute({2, 0, 1}), 1e-11);
  }
}

TEST_P(OptimizerRuleTest, HalfPrecisionHasAMaster) {
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kComplexHalf}) {
    const at::Tensor value =
        at::randn({300}, at::toOpMathType(dtype)).to(dtype);
    const auto store = store_with(value, optimizer(rule_));
    PlainOptimizer plain(value);
    for (int i = 0; i < 5; ++i) {
      const at::Tensor gradient =
          at::randn({300}, at::toOpMathType(dtype)).to(dtype);
      store->push(1, gradient);
      plain.step(rule_, gradient);
    }
    const at::Tensor master = state_of(store).tensors.at("master");
    EXPECT_EQ(master.scalar_type(), at::toOpMathType(dtype));
    expect_close(master, plain.like(master), 5e-5, c10::toString(dtype));
    expect_equal(
        at::view_as_real(value_of(store).to(at::kComplexFloat)),
        at::view_as_real(master.to(dtype).to(at::kComplexFloat)));
  }
}

TEST_P(OptimizerRuleTest, GradientsOfOtherDtypes) {
  const at::Tensor value = at::randn({300}, at::kFloat);
  const auto store = store_with(value, optimizer(rule_));
  PlainOptimizer plain(value);
  for (int i = 0; i < 4; ++i) {
    const at::Tensor a = at::randn({300}, at::kDouble);
    const at::Tensor b = at::randint(-3, 3, {300}, at::kLong);
    const at::Tensor c = at::randn({300}).to(at::kBFloat16);
    store->push(1, Tensors::replicas({a, b, c}));
    plain.step(rule_, a + b + c.to(at::kDouble));
  }
  expect_close(value_of(store), plain.like(value), 2e-5);
  for (const auto& [name, tensor] : state_of(store).tensors) {
    EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
  }
}

// A list in one pass, with keys of all sizes, matches one key after another.
TEST_P(OptimizerRuleTest, AListOfKeys) {
  constexpr int64_t kKeys = 40;
  const auto store = c10::make_intrusive<KVStore>();
  store->set_optimizer(optimizer(rule_));
  Keys keys;
  keys.single = false;
  std::vector<at::Tensor> values;
  std::vector<PlainOptimizer> plain;
  for (int64_t key = 0; key < kKeys; ++key) {
    keys.list.emplace_back(key);
    values.push_back(
        at::randn(
            {key == 7 ? 100000 : key * key},
            key % 2 == 0 ? at::kDouble : at::kFloat));
    plain.emplace_back(values.back(), key);
  }
  store->init(keys, Tensors::one_each(values));
  for (int i = 0; i < 3; ++i) {
    std::vector<at::Tensor> gradients;
    for (int64_t key = 0; key < kKeys; ++key) {
      gradients.push_back(at::randn_like(values[key]));
      plain[key].step(rule_, gradients.back());
    }
    store->push(keys, Tensors::one_each(gradients));
  }
  const auto pulled = store->pull(keys);
  for (int64_t key = 0; key < kKeys; ++key) {
    expect_close(
        pulled[key],
        plain[key].like(pulled[key]),
        tolerance_of(pulled[key].scalar_type()),
        "key " + std::to_string(key));
  }
}

// Its size is that of the options that have been used.
TEST_P(OptimizerRuleTest, StateAndRoundTrip) {
  const at::Tensor value = at::randn({7, 3});
  const auto store = store_with(value, optimizer(rule_));
  store->init(2, at::empty({0, 3})); // and one without elements
  const Keys both{1, 2};
  EXPECT_EQ(bytes_of(state_of(store)), 0);
  EXPECT_EQ(state_of(store).step, 0);
  const auto push = [&](const Store& to, double factor) {
    to->push(
        both, Tensors::one_each({at::full({7, 3}, factor), at::empty({0, 3})}));
  };
  push(store, 1);
  push(store, -2);
  int64_t num_states = 0;
  const KeyState state = state_of(store);
  for (const char* name : state_names(rule_)) {
    if (name != nullptr) {
      ++num_states;
      EXPECT_EQ(state.tensors.count(name), 1) << name;
      EXPECT_EQ(state_of(store, 2).tensors.count(name), 1) << name;
    }
  }
  EXPECT_EQ(bytes_of(state), num_states * 7 * 3 * 4);
  EXPECT_EQ(state_of(store, 2).step, 2);

  const auto copy =
      KVStore::from_state(StoreState::from_tuple(store->state().to_tuple()));
  expect_same_state(state_of(copy), state);
  const auto loaded = store_with(value_of(store), optimizer(rule_));
  loaded->init(2, at::empty({0, 3}));
  loaded->set_optimizer_states(both, store->optimizer_states(both));
  push(store, 3);
  push(copy, 3);
  push(loaded, 3);
  for (const auto& other : {copy, loaded}) {
    expect_equal(value_of(other), value_of(store));
    expect_same_state(state_of(other), state_of(store));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    OptimizerRuleTest,
    ::testing::ValuesIn(testing::rule_cases()),
    testing::rule_name);

} // namespace
} // namespace torchkv

// Keys with options of an optimizer: when they must exist in the store.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "core/errors.h"
#include "error_text.h"
#include "optimizer_helpers.h"

namespace torchkv {
namespace {

using testing::error_text;
using testing::expect_equal;
using testing::has;
using testing::optimizer;
using testing::value_of;

Optimizer with_options_of(const Key& key) {
  Optimizer result = optimizer("sgd", {{"lr", 1}});
  result.keys[key] = {0, 0.5, 1};
  return result;
}

TEST(OptionKeysTest, AStoreWithKeysRejectsUnknownOnes) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(
      {"fc.weight", "fc.bias"}, Tensors::one_each({at::ones(2), at::ones(2)}));
  store->set_optimizer(optimizer("sgd", {{"lr", 2}}));
  for (const bool keep_state : {false, true}) {
    const auto text = error_text([&] {
      store->set_optimizer(with_options_of("fc.wieght"), keep_state);
    });
    EXPECT_TRUE(has(text, "set_optimizer: expected options of keys")) << text;
    EXPECT_TRUE(has(text, "did you mean 'fc.weight'?")) << text;
    EXPECT_TRUE(has(text, "(key 'fc.wieght')")) << text;
    EXPECT_THROW(
        store->set_optimizer(with_options_of("fc.wieght"), keep_state),
        UnknownKeyError);
  }
  store->push("fc.bias", at::ones(2)); // of the optimizer before
  expect_equal(value_of(store, "fc.bias"), at::full(2, -1.));
  store->set_optimizer(with_options_of("fc.weight"));
  store->set_optimizer(
      with_options_of("other"), /*keep_state=*/true, /*check_keys=*/false);
}

TEST(OptionKeysTest, AnEmptyStoreRejectsTheFirstPush) {
  const auto store = c10::make_intrusive<KVStore>();
  store->set_optimizer(with_options_of(7));
  store->init(3, at::ones(2));
  EXPECT_EQ(store->expected_keys(), std::vector<Key>{7});
  for (int i = 0; i < 2; ++i) {
    const auto text = error_text([&] { store->push(3, at::ones(2)); });
    EXPECT_TRUE(has(text, "push: expected options of keys")) << text;
    EXPECT_TRUE(has(text, "(key 7)")) << text;
    EXPECT_THROW(store->pushpull(3, at::ones(2), at::ones(2)), UnknownKeyError);
  }
  expect_equal(value_of(store, 3), at::ones(2));
  store->init(7, at::ones(2));
  store->push(3, at::ones(2));
  EXPECT_TRUE(store->expected_keys().empty());
  store->erase(7); // a known one may be deleted
  store->push(3, at::ones(2));
  expect_equal(value_of(store, 3), at::full(2, -1.));
}

TEST(OptionKeysTest, AnotherUpdaterExpectsNothing) {
  const auto store = c10::make_intrusive<KVStore>();
  store->set_optimizer(with_options_of(7));
  store->init(3, at::ones(2));
  store->set_updater(nullptr);
  store->push(3, at::zeros(2));
  store->expect_keys({3, 8});
  EXPECT_THROW(store->push(3, at::ones(2)), UnknownKeyError);
  store->expect_keys(3); // instead
  store->push(3, at::ones(2));
  expect_equal(value_of(store, 3), at::ones(2));
}

// Options apply again once a deleted key is re-initialised.
TEST(OptionKeysTest, OptionsOutliveAKey) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init({3, 7}, Tensors::one_each({at::ones(2), at::ones(2)}));
  store->set_optimizer(with_options_of(7));
  store->erase(7);
  store->set_optimizer(with_options_of(7), /*keep_state=*/true);
  const auto copy =
      KVStore::from_state(StoreState::from_tuple(store->state().to_tuple()));
  for (const auto& one : {store, copy}) {
    one->init(7, at::ones(2));
    one->push(7, at::ones(2));
    expect_equal(value_of(one, 7), at::full(2, 0.5));
  }
}

// --- Optimizers by name, as in TorchScript

TEST(OptimizerByNameTest, NewNumbersKeepTheState) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(3, at::zeros(2));
  const uint64_t first =
      store->set_optimizer("sgd", {{"lr", 1}, {"momentum", 0.5}});
  store->push(3, at::ones(2)); // -1, with the buffer 1
  EXPECT_EQ(
      store->set_optimizer("sgd", {{"lr", 0.1}, {"momentum", 0.5}}), first);
  store->push(3, at::zeros(2)); // the buffer is 0.5
  expect_equal(value_of(store, 3), at::full(2, -1 - 0.1F * 0.5F));
  EXPECT_NE(store->set_optimizer("adamw"), first);
  EXPECT_EQ(store->optimizer_states(3)[0].step, 0);
}

TEST(OptimizerByNameTest, OptionsOfKeysAndOtherGroupsAreKept) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(
      {1, 2, 3}, Tensors::one_each({at::zeros(1), at::zeros(1), at::zeros(1)}));
  Optimizer groups = with_options_of(2);
  groups.groups.push_back(make_rule("test", "sgd", {{"lr", 8}}));
  groups.keys[3] = {1, 1, 1};
  store->set_optimizer(groups);
  store->set_optimizer("sgd", {{"lr", 4}});
  store->push(
      {1, 2, 3}, Tensors::one_each({at::ones(1), at::ones(1), at::ones(1)}));
  expect_equal(value_of(store, 1), at::full(1, -4.));
  expect_equal(value_of(store, 2), at::full(1, -2.));
  expect_equal(value_of(store, 3), at::full(1, -8.));
}

TEST(OptimizerByNameTest, TakesGradientOptions) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(3, at::zeros(1));
  store->set_optimizer(
      "sgd", {{"lr", 1}, {"rescale_grad", 0.25}, {"clip_value", 2}});
  store->push(3, at::full(1, 4.));
  expect_equal(value_of(store, 3), at::full(1, -1.));
  store->push(3, at::full(1, 400.));
  expect_equal(value_of(store, 3), at::full(1, -3.));
}

TEST(OptimizerByNameTest, RejectedNumbersChangeNothing) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(3, at::zeros(1));
  store->set_optimizer("sgd", {{"lr", 1}});
  for (const NumbersByName& numbers :
       {NumbersByName{{"beta1", 0.5}},
        NumbersByName{{"lr", -1}},
        NumbersByName{{"rescale_grad", NAN}},
        NumbersByName{{"accumulate", 0.5}}}) {
    EXPECT_THROW(store->set_optimizer("sgd", numbers), c10::ValueError);
  }
  EXPECT_THROW(store->set_optimizer("sgdd"), c10::ValueError);
  store->push(3, at::ones(1));
  expect_equal(value_of(store, 3), at::full(1, -1.));
}

} // namespace
} // namespace torchkv

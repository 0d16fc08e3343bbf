// An optimizer's state: when it is created, kept and dropped, and how it is
// saved and restored.
#include "update/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "counting_runtime.h"
#include "error_text.h"
#include "optimizer_helpers.h"
#include "plain_optimizer.h"

namespace torchkv {
namespace {

using testing::bytes_of;
using testing::CountingRuntime;
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

TEST(OptimizerStateTest, IsCreatedOnceAtTheFirstStep) {
  CountingRuntime runtime;
  const auto store = c10::make_intrusive<KVStore>("local", runtime);
  store->init({1, 2}, Tensors::one_each({at::zeros(100), at::zeros(100)}));
  store->set_optimizer(optimizer("adam", {}));
  runtime.bytes = 0;
  store->push(1, at::ones(100));
  EXPECT_EQ(runtime.bytes, 2 * 400); // of this key alone
  store->push(1, Tensors::replicas({at::ones(100), at::ones(100)}));
  EXPECT_EQ(runtime.bytes, 2 * 400);
  store->set_optimizer(optimizer("adam", {{"amsgrad", 1}}), true);
  EXPECT_EQ(runtime.bytes, 2 * 400);
  store->push(1, at::ones(100));
  EXPECT_EQ(runtime.bytes, 3 * 400);
  store->push(1, at::ones(100));
  EXPECT_EQ(runtime.bytes, 3 * 400);
  store->set_optimizer(optimizer("sgd", {}));
  store->push({1, 2}, Tensors::one_each({at::ones(100), at::ones(100)}));
  EXPECT_EQ(runtime.bytes, 3 * 400); // none
}

TEST(OptimizerStateTest, HalfPrecisionNeedsAMasterOnly) {
  CountingRuntime runtime;
  const auto store = c10::make_intrusive<KVStore>("local", runtime);
  store->init(1, at::zeros(100, at::kBFloat16));
  store->set_optimizer(optimizer("sgd", {}));
  runtime.bytes = 0;
  store->push(1, at::ones(100, at::kBFloat16));
  store->push(1, at::ones(100));
  EXPECT_EQ(runtime.bytes, 400);
}

TEST(OptimizerStateTest, SurvivesNewNumbersButNotAnotherOptimizer) {
  const auto store = store_with(at::zeros(3), optimizer("adam", {{"lr", 0.1}}));
  PlainOptimizer plain(at::zeros(3));
  RuleSpec rule = make_rule("test", "adam", {{"lr", 0.1}});
  const auto push = [&](double g) {
    store->push(1, at::full(3, g));
    plain.step(rule, at::full(3, g));
  };
  push(1);
  push(2);
  rule = make_rule("test", "adam", {{"lr", 0.01}, {"weight_decay", 0.1}});
  store->set_optimizer(optimizer(rule), /*keep_state=*/true);
  EXPECT_EQ(state_of(store).step, 2);
  push(-3);
  expect_close(value_of(store), plain.like(at::zeros(3)), 1e-6);
  EXPECT_EQ(state_of(store).step, 3);

  store->set_optimizer(optimizer(rule));
  EXPECT_EQ(state_of(store).step, 0);
  EXPECT_EQ(bytes_of(state_of(store)), 0);
  PlainOptimizer anew(value_of(store));
  store->push(1, at::ones(3));
  anew.step(rule, at::ones(3));
  expect_close(value_of(store), anew.like(at::zeros(3)), 1e-6);
  EXPECT_EQ(state_of(store).step, 1);
}

TEST(OptimizerStateTest, AMasterOfAnotherOptimizerIsDropped) {
  const auto store =
      store_with(at::ones(3, at::kHalf), optimizer("sgd", {{"lr", 1e-5}}));
  store->push(1, at::ones(3, at::kHalf)); // too small to change fp16
  store->set_updater(nullptr);
  store->push(1, at::full(3, 5, at::kHalf));
  store->set_optimizer(optimizer("sgd", {{"lr", 1}}));
  store->push(1, at::ones(3, at::kHalf));
  expect_equal(value_of(store), at::full(3, 4, at::kHalf));
}

TEST(OptimizerStateTest, OptionsEnabledLater) {
  struct Switch {
    const char* rule;
    const char* option;
    double value;
    const char* state;
  };
  for (const auto& [rule, option, value, state] :
       {Switch{"adam", "amsgrad", 1, "max_exp_avg_sq"},
        Switch{"rmsprop", "centered", 1, "grad_avg"},
        Switch{"rmsprop", "momentum", 0.9, "momentum_buffer"},
        Switch{"sgd", "momentum", 0.9, "momentum_buffer"}}) {
    SCOPED_TRACE(std::string(rule) + ' ' + option);
    const auto store =
        store_with(at::zeros(3, at::kDouble), optimizer(rule, {{"lr", 0.1}}));
    store->push(1, at::ones(3));
    store->push(1, at::ones(3));
    EXPECT_EQ(state_of(store).tensors.count(state), 0);
    store->set_optimizer(
        optimizer(rule, {{"lr", 0.1}, {option, value}}), /*keep_state=*/true);
    // Between the switch and the next step, a store can be saved.
    const auto copy = KVStore::from_state(store->state());
    expect_same_state(state_of(copy), state_of(store));
    for (const auto& each : {store, copy}) {
      each->push(1, at::full(3, 2.));
      EXPECT_EQ(state_of(each).tensors.count(state), 1);
      EXPECT_EQ(state_of(each).step, 3);
    }
    expect_equal(value_of(copy), value_of(store));
    store->set_optimizer(optimizer(rule, {{"lr", 0.1}}), /*keep_state=*/true);
    EXPECT_EQ(state_of(store).tensors.count(state), 0);
  }
}

TEST(OptimizerStateTest, AMomentumEnabledLaterStartsWithItsFirstGradient) {
  const auto store =
      store_with(at::zeros(2, at::kDouble), optimizer("sgd", {{"lr", 1}}));
  store->push(1, at::ones(2));
  store->set_optimizer(
      optimizer("sgd", {{"lr", 1}, {"momentum", 0.5}, {"dampening", 0.5}}),
      /*keep_state=*/true);
  store->push(1, at::full(2, 4.)); // the buffer is 4, not dampened
  expect_equal(value_of(store), at::full(2, -5., at::kDouble));
  store->push(1, at::full(2, 2.)); // 0.5 * 4 + 0.5 * 2
  expect_equal(value_of(store), at::full(2, -8., at::kDouble));
}

TEST(OptimizerStateTest, KeepingTheStateNeedsTheSameRule) {
  const auto store = c10::make_intrusive<KVStore>();
  const auto keep = [&] {
    store->set_optimizer(optimizer("adam", {}), /*keep_state=*/true);
  };
  EXPECT_TRUE(has(error_text(keep), "no optimizer is set"));
  store->set_optimizer(optimizer("sgd", {}));
  EXPECT_TRUE(has(error_text(keep), "got 'adam' where 'sgd' is"));
  store->set_optimizer(optimizer("adam", {}));
  EXPECT_EQ(error_text(keep), "no error");
}

TEST(OptimizerStateTest, CopiesShareNothingWithTheStore) {
  const auto store = store_with(at::zeros(3), optimizer("lion", {{"lr", 1}}));
  store->push(1, at::ones(3));
  auto state = state_of(store);
  state.tensors.at("exp_avg").fill_(-100);
  store->push(1, at::ones(3));
  expect_equal(value_of(store), at::full(3, -2.));
  store->set_optimizer_states(1, {state});
  state.tensors.at("exp_avg").fill_(100);
  store->push(1, at::ones(3));
  expect_equal(value_of(store), at::full(3, -1.));
}

TEST(OptimizerStateTest, RejectedStatesChangeNothing) {
  const auto store = store_with(at::zeros(3), optimizer("adam", {}));
  store->init(2, at::zeros(3));
  const Keys both{1, 2};
  const auto push = [&] {
    store->push(both, Tensors::one_each({at::ones(3), at::ones(3)}));
  };
  push();
  const auto before = store->optimizer_states(both);
  const at::Tensor good = at::ones(3);
  const std::vector<std::pair<KeyState, const char*>> bad{
      {{-1, 0, {{"exp_avg", good}, {"exp_avg_sq", good}}},
       "step to be from 0 to 9007199254740992, but got -1"},
      {{1, -1, {{"exp_avg", good}, {"exp_avg_sq", good}}},
       "num_accumulated to be from 0"},
      {{1, 1, {{"exp_avg", good}, {"exp_avg_sq", good}}},
       "but got num_accumulated 1"},
      {{1, 0, {{"exp_avg", good}, {"exp_avg_sq", good}, {"accumulated", good}}},
       "but got num_accumulated 0"},
      {{(int64_t{1} << 53) + 1, 0, {{"exp_avg", good}, {"exp_avg_sq", good}}},
       "but got 9007199254740993"},
      {{1,
        int64_t{1} << 62,
        {{"exp_avg", good}, {"exp_avg_sq", good}, {"accumulated", good}}},
       "num_accumulated to be from 0"},
      {{1, 0, {{"exp_avg", good}}}, "missing state 'exp_avg_sq'"},
      {{1, 0, {{"sum", good}}}, "unexpected state 'sum'"},
      {{1, 0, {{"exp_avg", good}, {"exp_avg_sq", good}, {"master", good}}},
       "unexpected state 'master'"}, // the value is that itself
      {{1, 0, {{"exp_avg", at::ones(4)}, {"exp_avg_sq", good}}},
       "expected shape [3], but got [4]"},
      {{1,
        0,
        {{"exp_avg", at::ones(3, at::kComplexFloat)}, {"exp_avg_sq", good}}},
       "torch.complex64"}};
  for (const auto& [state, text] : bad) {
    const auto actual = error_text([&, &state = state] {
      store->set_optimizer_states(both, {before[0], state});
    });
    EXPECT_TRUE(has(actual, text)) << actual << "\nexpected: " << text;
    EXPECT_TRUE(has(actual, "set_optimizer_states")) << actual;
  }
  EXPECT_TRUE(
      has(error_text([&] { store->set_optimizer_states(both, {before[0]}); }),
          "2 states, one for each key, but got 1"));
  EXPECT_THROW(
      store->set_optimizer_states({1, 3}, {before[0], before[1]}),
      UnknownKeyError);
  EXPECT_THROW(
      store->set_optimizer_states(
          1, {{1, 0, {{"exp_avg", at::Tensor()}, {"exp_avg_sq", good}}}}),
      c10::TypeError);
  for (int64_t key : {1, 2}) {
    expect_same_state(state_of(store, key), before[key - 1]);
  }
}

// If a state does not fit into memory, the old one is kept.
TEST(OptimizerStateTest, RunningOutOfMemoryChangesNothing) {
  CountingRuntime runtime;
  const auto store = c10::make_intrusive<KVStore>("local", runtime);
  store->init(1, at::zeros(3));
  store->set_optimizer(optimizer("adam", {}));
  store->push(1, at::ones(3));
  const auto before = state_of(store);
  KeyState other{9, 0, {{"exp_avg", at::ones(3)}, {"exp_avg_sq", at::ones(3)}}};
  runtime.num_left = 1;
  EXPECT_THROW(store->set_optimizer_states(1, {other}), c10::Error);
  runtime.num_left = 1 << 30;
  expect_same_state(state_of(store), before);
}

// The first step runs out of memory for the second key's state.
TEST(OptimizerStateTest, AStepThatRanOutOfMemoryCanBeRepeated) {
  CountingRuntime runtime;
  const auto store = c10::make_intrusive<KVStore>("local", runtime);
  const Keys keys{1, 2};
  store->init(keys, Tensors::one_each({at::zeros(3), at::zeros(3)}));
  store->set_optimizer(
      optimizer("sgd", {{"lr", 1}, {"momentum", 0.5}, {"dampening", 0.5}}));
  const auto gradients = Tensors::one_each({at::ones(3), at::ones(3)});
  runtime.num_left = 1;
  EXPECT_THROW(store->push(keys, gradients), c10::Error);
  runtime.num_left = 1 << 30;
  expect_equal(value_of(store, 1), at::zeros(3));
  store->push(keys, gradients);
  expect_equal(value_of(store, 1), at::full(3, -1.));
  expect_equal(value_of(store, 2), at::full(3, -1.));
}

TEST(OptimizerStateTest, NeedsAnOptimizerAndAnOpenStore) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(1, at::zeros(3));
  EXPECT_TRUE(
      has(error_text([&] { store->optimizer_states(1); }), "has no optimizer"));
  EXPECT_TRUE(
      has(error_text([&] { store->set_optimizer_states(1, {}); }),
          "has no optimizer"));
  store->set_optimizer(optimizer("sgd", {}));
  store->close();
  for (const std::string& text :
       {error_text([&] { store->optimizer_states(1); }),
        error_text([&] { store->set_optimizer_states(1, {{}}); }),
        error_text([&] { store->num_skipped(); }),
        error_text([&] { store->set_optimizer(optimizer("sgd", {})); })}) {
    EXPECT_TRUE(has(text, "close")) << text;
  }
}

TEST(OptimizerStateTest, GroupsAndMultipliersRoundTrip) {
  Optimizer groups = optimizer("sgd", {{"lr", 1}}, {{"rescale_grad", 0.5}});
  groups.groups.push_back(make_rule("test", "sgd", {{"lr", 4}}));
  groups.keys[2] = {1, 0.5, 1};
  groups.keys["other"] = {0, 3, 2}; // of the other kind
  groups.keys[3] = {1, 1, 1};
  const auto store = c10::make_intrusive<KVStore>("device");
  const Keys keys{1, 2, 3};
  const auto each = [](double number) {
    return Tensors::one_each(std::vector<at::Tensor>(3, at::full(2, number)));
  };
  store->init(keys, each(0));
  store->set_optimizer(groups, /*keep_state=*/false, /*check_keys=*/false);
  const auto copy =
      KVStore::from_state(StoreState::from_tuple(store->state().to_tuple()));
  for (const auto& one : {store, copy}) {
    one->push(keys, each(2));
    expect_equal(value_of(one, 1), at::full(2, -1.));
    expect_equal(value_of(one, 2), at::full(2, -2.));
    expect_equal(value_of(one, 3), at::full(2, -4.));
  }
  const auto again = copy->state().optimizer;
  EXPECT_EQ(again->keys.at("other").lr_mult, 3);
  EXPECT_EQ(again->keys.at("other").wd_mult, 2);
}

TEST(OptimizerStateTest, InconsistentPartsAreRejected) {
  const auto store = store_with(at::zeros(3), optimizer("adam", {}));
  store->push(1, at::ones(3));
  const auto refused = [&](auto change) {
    auto tuple = store->state().to_tuple();
    change(std::get<8>(tuple));
    const auto text = error_text(
        [&] { KVStore::from_state(StoreState::from_tuple(std::move(tuple))); });
    return has(text, ": expected") || has(text, ": unknown ") ||
        has(text, ": missing state");
  };
  EXPECT_FALSE(refused([](auto&) {}));
  EXPECT_TRUE(refused([](auto& t) { std::get<0>(t) = "nadam"; }));
  EXPECT_TRUE(refused([](auto& t) { std::get<1>(t).clear(); }));
  EXPECT_TRUE(
      refused([](auto& t) { std::get<1>(t)[0].insert_or_assign("lr", -1); }));
  EXPECT_TRUE(refused([](auto& t) { std::get<2>(t).insert("clip", 1); }));
  EXPECT_TRUE(refused([](auto& t) { std::get<3>(t).push_back(1); }));
  EXPECT_TRUE(refused([](auto& t) {
    std::get<3>(t).push_back(1);
    std::get<5>(t).push_back(-1); // no group
    std::get<6>(t) = {1, 1};
  }));
  EXPECT_TRUE(refused([](auto& t) { std::get<7>(t)[0] = INT64_MAX; }));
  EXPECT_TRUE(refused([](auto& t) { std::get<7>(t).push_back(1); }));
  EXPECT_TRUE(refused([](auto& t) { std::get<8>(t).clear(); }));
  EXPECT_TRUE(refused([](auto& t) { std::get<9>(t).clear(); }));
  EXPECT_TRUE(
      refused([](auto& t) { (void)std::get<9>(t)[0].erase("exp_avg"); }));
}

} // namespace
} // namespace torchkv

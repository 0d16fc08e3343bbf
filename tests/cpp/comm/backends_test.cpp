// A form of values that the store does not know, with a backend of its own: the
// same bits as the dense values that it stands for, and clear errors without.
#include "comm/backends.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "error_text.h"
#include "function_updater.h"
#include "kvstore.h"
#include "optimizer_helpers.h"
#include "run_length.h"
#include "store/local_store.h"
#include "store/registry.h"

namespace torchkv {
namespace {

using testing::constant;
using testing::error_text;
using testing::expect_equal;
using testing::expect_same_state;
using testing::has;
using testing::optimizer;
using testing::Pushed;
using testing::RegisteredRunLength;
using testing::runs;

const std::vector<int64_t> kSizes{5, 7};
const Keys kKeys{1, 2};

LocalStore::Options options(bool is_sharded) {
  LocalStore::Options result;
  if (is_sharded) {
    result.policy = Placement::Policy::kShardAll;
    result.places = "cpu,cpu,cpu";
  }
  return result;
}

// A store that gets encoded values, and one that gets the dense ones. With
// GetParam(), they shard their values.
class BackendsTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    at::manual_seed(3);
    replace_store(
        "whole or sharded",
        [](Runtime& runtime, const StoreOptions& /*options*/) {
          return std::make_unique<LocalStore>(runtime, options(GetParam()));
        });
    init(c10::kFloat);
  }
  void TearDown() override {
    replace_store("whole or sharded", {});
  }
  void init(c10::ScalarType dtype) {
    const Tensors values = Tensors::one_each(
        {at::randn(kSizes).to(dtype), at::randn(kSizes).to(dtype)});
    for (auto* store : {&encoded_, &dense_}) {
      *store = c10::make_intrusive<KVStore>("whole or sharded");
      (*store)->init(kKeys, values);
    }
  }

  void push(const Keys& keys, const std::vector<std::vector<Pushed>>& groups) {
    (void)encoded_->push(keys, testing::encoded(groups), {});
    (void)dense_->push(keys, testing::dense(groups), {});
    expect_same();
  }
  // One value, replicas some of which are dense, runs across shards, several
  // keys, repeated keys.
  void push_all() {
    const auto random = [] { return Pushed{at::randn(kSizes)}; };
    const Pushed several = runs({0.3, -2, 1.7}, {11, 20, 4}, kSizes);
    push(1, {{constant(0.1, kSizes)}});
    push(1, {{random(), several, constant(0.7, kSizes), random()}});
    push(1, {{several}});
    push({1, 2}, {{several, random(), random()}, {random()}});
    push({2, 1, 2}, {{random()}, {random()}, {several, constant(4, kSizes)}});
  }

  void set(const Optimizer& optimizer) {
    for (const auto& store : {encoded_, dense_}) {
      store->set_optimizer(optimizer, /*keep_state=*/false, true);
    }
  }

  void expect_same() {
    for (const auto& key : kKeys.list) {
      expect_equal(encoded_->pull(key)[0], dense_->pull(key)[0]);
    }
    EXPECT_EQ(encoded_->grad_norm(), dense_->grad_norm());
    EXPECT_EQ(encoded_->num_skipped(), dense_->num_skipped());
    if (std::holds_alternative<OptimizerPtr>(encoded_->current_updater())) {
      const auto states = encoded_->optimizer_states(kKeys);
      const auto expected = dense_->optimizer_states(kKeys);
      for (size_t i = 0; i < states.size(); ++i) {
        expect_same_state(states[i], expected[i]);
      }
    }
  }

  c10::intrusive_ptr<KVStore> encoded_;
  c10::intrusive_ptr<KVStore> dense_;
};

INSTANTIATE_TEST_SUITE_P(Whole, BackendsTest, ::testing::Values(false));
INSTANTIATE_TEST_SUITE_P(Sharded, BackendsTest, ::testing::Values(true));

TEST_P(BackendsTest, AssignsEncodedValues) {
  RegisteredRunLength form;
  push_all();
  // Of a sharded value, each shard's own elements.
  EXPECT_EQ(form.seen.begins.size() > 1, GetParam());
  EXPECT_EQ(*form.seen.begins.begin(), 0);
}

TEST_P(BackendsTest, StepsWithEncodedGradients) {
  const RegisteredRunLength form;
  for (const auto& rule :
       {optimizer("sgd", {{"lr", 0.1}, {"momentum", 0.9}}),
        optimizer("adam", {{"lr", 0.01}}),
        optimizer("lamb", {{"lr", 0.01}})}) {
    set(rule);
    push_all();
  }
}

TEST_P(BackendsTest, OfOtherDtypes) {
  const RegisteredRunLength form;
  init(c10::kHalf);
  for (const bool steps : {false, true}) {
    if (steps) {
      set(optimizer("sgd", {{"lr", 0.1}, {"momentum", 0.9}}));
    }
    for (const auto dtype : {c10::kHalf, c10::kDouble, c10::kInt}) {
      push(
          1,
          {{runs({3.1, -2}, {8, 27}, kSizes, dtype),
            {at::randn(kSizes)},
            {at::randn(kSizes, at::kHalf)}}});
    }
  }
}

TEST_P(BackendsTest, AccumulatesEncodedGradients) {
  const RegisteredRunLength form;
  set(optimizer("sgd", {{"lr", 0.1}, {"momentum", 0.9}}, {{"accumulate", 3}}));
  push_all();
  EXPECT_EQ(encoded_->optimizer_states(1)[0].num_accumulated, 2);
}

TEST_P(BackendsTest, ClipsEncodedGradients) {
  const RegisteredRunLength form;
  set(optimizer(
      "sgd",
      {{"lr", 0.1}, {"momentum", 0.9}},
      {{"max_norm", 0.5}, {"clip_value", 1.5}, {"skip_nonfinite", 1}}));
  push_all();
  EXPECT_TRUE(encoded_->grad_norm().has_value());
  push({1, 2}, {{constant(INFINITY, kSizes)}, {{at::randn(kSizes)}}});
  EXPECT_EQ(encoded_->num_skipped(), 1);
}

TEST_P(BackendsTest, HandsTheirSumToAnOpaqueUpdater) {
  const RegisteredRunLength form;
  const auto updater = testing::updater_of(
      [](auto& input, auto& stored) { stored.mul_(0.5).add_(input); });
  encoded_->set_updater(updater);
  dense_->set_updater(updater);
  push_all();
}

TEST_P(BackendsTest, WithoutABackendNothingChanges) {
  set(optimizer("sgd", {{"lr", 0.1}, {"momentum", 0.9}}));
  const at::Tensor out = at::zeros(kSizes);
  const auto values = testing::encoded(
      {{{at::ones(kSizes)}, constant(1, kSizes)}, {{at::ones(kSizes)}}});
  const auto text = [](const char* op) {
    return std::string(op) +
        ": expected a value of a form that has a backend, but got "
        "'run-length' (key 2)";
  };
  const Keys keys{2, 1};
  EXPECT_EQ(
      error_text<c10::NotImplementedError>(
          [&] { (void)encoded_->push(keys, values, {}); }),
      text("push"));
  EXPECT_EQ(
      error_text<c10::NotImplementedError>([&] {
        (void)encoded_->pushpull(
            keys, values, Tensors::one_each({out, out}), {});
      }),
      text("pushpull"));
  EXPECT_TRUE(at::equal(out, at::zeros(kSizes)));
  expect_same();
}

TEST_P(BackendsTest, ABackendMayRefuse) {
  RegisteredRunLength form;
  set(optimizer("sgd", {{"lr", 0.1}, {"momentum", 0.9}}, {{"accumulate", 2}}));
  push_all();
  form.seen.claims = false;
  const auto values =
      testing::encoded({{{at::ones(kSizes)}}, {constant(1, kSizes)}});
  for (int i = 0; i < 2; ++i) {
    const auto text = error_text<c10::NotImplementedError>(
        [&] { (void)encoded_->push({1, 2}, values, {}); });
    EXPECT_TRUE(has(text, "run-length")) << text;
    EXPECT_TRUE(has(text, "(key 2)")) << text;
    expect_same();
  }
}

TEST_P(BackendsTest, ChecksEncodedValues) {
  const RegisteredRunLength form;
  const auto push_of = [&](const Pushed& value) {
    return [&] { (void)encoded_->push(1, testing::encoded({{value}}), {}); };
  };
  EXPECT_EQ(
      error_text(push_of(constant(1, {7, 5}))),
      "push: expected shape [5, 7], but got [7, 5] (key 1)");
  EXPECT_EQ(
      error_text<c10::TypeError>(
          push_of(constant(1, kSizes, at::kComplexFloat))),
      "push: expected a value that converts to torch.float32, but got "
      "torch.complex64 (key 1)");
  expect_same();
}

TEST_P(BackendsTest, StoredValuesAreDense) {
  const RegisteredRunLength form;
  const Tensors value = testing::encoded({{constant(1, kSizes)}});
  const auto text = [](const std::string& op, int key) {
    return c10::str(
        op,
        ": expected a dense tensor, but got a value of form 'run-length' (key ",
        key,
        ")");
  };
  const at::Tensor out = at::zeros(kSizes);
  EXPECT_EQ(
      error_text<c10::NotImplementedError>([&] { encoded_->init(3, value); }),
      text("init", 3));
  EXPECT_EQ(
      error_text<c10::NotImplementedError>(
          [&] { (void)encoded_->broadcast(3, value, out, {}); }),
      text("broadcast", 3));
  EXPECT_EQ(
      error_text<c10::NotImplementedError>([&] { encoded_->assign(1, value); }),
      text("assign", 1));
  EXPECT_FALSE(encoded_->contains(3));
  expect_same();
}

// As users of C++ call it.
TEST(EncodedTest, OneValueForOneKey) {
  const RegisteredRunLength form;
  const auto store = c10::make_intrusive<KVStore>();
  store->init(1, at::zeros({3, 4}).t());
  const Pushed value = constant(2, {4, 3});
  store->push(1, Tensors::encoded(value.data, value.code));
  expect_equal(store->pull(1)[0], at::full({4, 3}, 2.F));
}

} // namespace
} // namespace torchkv

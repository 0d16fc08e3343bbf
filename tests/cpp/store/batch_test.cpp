// Batch: an entry's state after an optimizer has been replaced, and when memory
// runs out.
#include "store/batch.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "counting_runtime.h"
#include "kvstore.h"
#include "pipeline.h"

namespace torchkv {
namespace {

using testing::CountingRuntime;

Optimizer optimizer_of(
    const char* rule,
    const NumbersByName& numbers,
    uint64_t generation = 0) {
  Optimizer optimizer{{make_rule("test", rule, numbers)}, {}, {}};
  optimizer.generation = generation;
  return optimizer;
}

at::Tensor ones() {
  return at::ones({3, 4});
}

class BatchTest : public ::testing::Test {
 protected:
  BatchTest() {
    for (int64_t id : {3, 5}) {
      entries_.push_back(
          c10::make_intrusive<Entry>(Key(id), Meta{{3, 4}, c10::kFloat, 12}));
      pipeline_.placement.store(*entries_.back(), ones());
    }
  }

  float value_of(size_t i) const {
    return entries_[i]->slices[0].value[0][0].item<float>();
  }

  CountingRuntime runtime_;
  testing::Pipeline pipeline_{Placement::Policy::kCpu, runtime_};
  Entries entries_;
};

TEST_F(BatchTest, StateOfAnotherOptimizerIsIgnored) {
  const Optimizer sgd = optimizer_of("sgd", {{"lr", 0.5}}, 7);
  entries_[0]->generation = 7;
  entries_[0]->step = 4;
  entries_[1]->generation = 6;
  entries_[1]->step = 9;
  const Tensors values = Tensors::one_each({ones(), ones()});
  const Groups groups(entries_, values);
  Batch batch(groups, 0, 2);
  batch.plan(
      sgd,
      []() -> OptimizerPtr {
        ADD_FAILURE();
        return nullptr;
      },
      pipeline_.slices);
  ASSERT_EQ(batch.stepping.size(), 2);
  EXPECT_EQ(batch.steps[0].step, 5);
  EXPECT_EQ(batch.steps[1].step, 1);
  EXPECT_EQ(entries_[1]->generation, 7);
}

// A push in flight since before set_optimizer.
TEST_F(BatchTest, ALateStepUsesTheOptimizerThatUpdatedTheKey) {
  const Optimizer old = optimizer_of("sgd", {{"lr", 0.5}}, 7);
  const auto newer = std::make_shared<const Optimizer>(
      optimizer_of("adam", {{"lr", 0.25}}, 8));
  entries_[0]->generation = 8;
  entries_[0]->step = 4;
  const Tensors values = Tensors::one_each({ones(), ones()});
  const Groups groups(entries_, values);
  Batch batch(groups, 0, 2);
  batch.plan(old, [&] { return newer; }, pipeline_.slices);
  ASSERT_EQ(batch.steps.size(), 2);
  EXPECT_EQ(batch.steps[0].step, 5);
  EXPECT_EQ(batch.steps[0].rule.id, RuleSpec::Id::kAdam);
  EXPECT_EQ(batch.steps[0].rule.lr, 0.25);
  EXPECT_EQ(entries_[0]->generation, 8);
  EXPECT_EQ(batch.steps[1].step, 1);
  EXPECT_EQ(batch.steps[1].rule.lr, 0.5);
  EXPECT_EQ(entries_[1]->generation, 7);
}

TEST_F(BatchTest, ALateStepAfterTheLastOptimizerUsesItsOwn) {
  const Optimizer old = optimizer_of("sgd", {{"lr", 0.5}}, 7);
  entries_[0]->generation = 8;
  entries_[0]->step = 4;
  const Tensors values = Tensors::one_each({ones(), ones()});
  const Groups groups(entries_, values);
  Batch batch(groups, 0, 2);
  batch.plan(old, [] { return nullptr; }, pipeline_.slices);
  EXPECT_EQ(batch.steps[0].step, 1);
  EXPECT_EQ(entries_[0]->generation, 7);
}

// For all ways to sum: contiguous, strided, and by torch's operators.
TEST_F(BatchTest, RunningOutOfMemoryChangesNothing) {
  const at::Tensor strided = at::ones({3, 8}).slice(1, 0, 8, 2);
  const at::Tensor negated =
      at::imag(at::complex(ones(), -ones()).conj()); // 1, lazily
  ASSERT_TRUE(negated.is_neg());
  const Optimizer sgd =
      optimizer_of("sgd", {{"lr", 0.5}, {"momentum", 0.9}}, 7);
  const auto push = [&] {
    const Tensors values = Tensors::one_each({strided, negated});
    const Groups groups(entries_, values);
    Batch batch(groups, 0, 2);
    batch.plan(sgd, [] { return nullptr; }, pipeline_.slices);
    pipeline_.reducer.update(batch.stepping);
  };
  const size_t alive = runtime_.num_alive();
  for (int num_left = 0; num_left < 3; ++num_left) {
    runtime_.num_left = num_left;
    EXPECT_THROW(push(), c10::Error) << num_left;
    EXPECT_EQ(value_of(0), 1) << num_left;
    EXPECT_EQ(value_of(1), 1) << num_left;
    EXPECT_EQ(runtime_.num_alive(), alive) << num_left;
  }
  runtime_.num_left = 3; // two momentum buffers and a sum
  push();
  EXPECT_EQ(value_of(0), 0.5);
  EXPECT_EQ(value_of(1), 0.5);
}

// Copies of transposed values use one scratch tensor, allocated before any sum.
TEST(TransposedTest, WithoutMemoryNothingChanges) {
  CountingRuntime runtime;
  KVStore store("local", runtime);
  store.init({3, 5}, Tensors::one_each({at::ones({3, 4}), at::ones({99, 99})}));
  const Tensors values = Tensors::one_each(
      {at::full({4, 3}, 2.F).t(), at::full({99, 99}, 2.F).t()});
  runtime.num_left = 0;
  EXPECT_THROW(store.push({3, 5}, values), c10::Error);
  runtime.num_left = 1 << 30;
  for (const auto& value : store.pull({3, 5})) {
    EXPECT_TRUE(value.eq(1).all().item<bool>());
  }
  const size_t alive = runtime.num_alive();
  runtime.num_left = 1;
  store.push({3, 5}, values);
  EXPECT_EQ(runtime.num_alive(), alive);
  runtime.num_left = 1 << 30;
  for (const auto& value : store.pull({3, 5})) {
    EXPECT_TRUE(value.eq(2).all().item<bool>());
  }
}

TEST(ReplacedOptimizerTest, ItsStateIsFreed) {
  CountingRuntime runtime;
  KVStore store("local", runtime);
  store.init({3, 5}, Tensors::one_each({ones(), ones()}));
  const auto push = [&] {
    store.push({3, 5}, Tensors::one_each({ones(), ones()}));
  };
  store.set_optimizer(optimizer_of("adam", {}));
  push();
  EXPECT_EQ(runtime.num_alive(), 6);
  store.set_optimizer(optimizer_of("sgd", {{"momentum", 0.9}}));
  EXPECT_EQ(runtime.num_alive(), 2);
  push();
  EXPECT_EQ(runtime.num_alive(), 4);
  store.set_updater(nullptr);
  EXPECT_EQ(runtime.num_alive(), 2);
  store.set_optimizer(optimizer_of("adam", {}));
  push();
  store.set_optimizer(optimizer_of("adam", {{"lr", 0.5}}), /*keep_state=*/true);
  EXPECT_EQ(runtime.num_alive(), 6);
}

} // namespace
} // namespace torchkv

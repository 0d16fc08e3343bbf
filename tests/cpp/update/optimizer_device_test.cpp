// Optimizers on the Reducer's path for accelerators, with a runtime whose
// devices are CPU memory.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "optimizer_helpers.h"
#include "pipeline.h"
#include "recording_runtime.h"

namespace torchkv {
namespace {

using testing::expect_close;
using testing::expect_equal;
using testing::optimizer;
using testing::state_of;
using testing::store_with;
using testing::value_of;

class DeviceRuleTest : public testing::RuleTest {};

// Matches the CPU, and state that began there.
TEST_P(DeviceRuleTest, MatchesTheCpu) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexFloat}) {
    testing::RecordingRuntime runtime;
    testing::Pipeline pipeline(Placement::Policy::kShardAll, runtime);
    const auto random = [&] {
      return at::randn({33, 5}, at::toOpMathType(dtype)).to(dtype);
    };
    const at::Tensor value = random();
    Entry entry(1, {{33, 5}, dtype, 33 * 5});
    pipeline.placement.store(entry, value);
    const auto store = store_with(value, optimizer(rule_));
    const at::Tensor somewhere =
        at::empty({33, 5}, at::TensorOptions().device(at::kMeta));
    for (int t = 1; t <= 4; ++t) {
      if (t == 3) { // by now it has state
        pipeline.placement.place(
            Item{&entry, {}, somewhere, nullptr}, /*may_shard=*/true);
        EXPECT_TRUE(entry.slices[0].home.device.is_meta());
      }
      const std::vector<at::Tensor> gradients{random(), random()};
      store->push(1, Tensors::replicas(gradients));
      const std::vector<Value> values{
          Value(&gradients[0]), Value(&gradients[1])};
      RuleStep step;
      optimizer(rule_).set_step(step, 1, t - 1);
      Item item{&entry, values, {}, &step};
      if (t == 4) { // the sum of two pushes
        pipeline.reducer.accumulate(
            Item{&entry, c10::ArrayRef<Value>(values[0]), {}, nullptr});
        entry.num_accumulated = 1;
        item.values = values[1];
      }
      pipeline.reducer.update(item);
      entry.step = t;
      entry.num_accumulated = 0;
    }
    const KeyState expected = state_of(store);
    const KeyState state = pipeline.slices.state_of(entry, rule_);
    EXPECT_EQ(state.tensors.size(), expected.tensors.size());
    for (const auto& [name, tensor] : expected.tensors) {
      expect_close(state.tensors.at(name), tensor, 3e-6, name);
    }
    if (dtype != at::kBFloat16) {
      expect_close(entry.slices[0].value, value_of(store), 3e-6);
    } else {
      expect_equal(
          entry.slices[0].value, entry.slices[0].master.to(at::kBFloat16));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    DeviceRuleTest,
    ::testing::ValuesIn(testing::rule_cases()),
    testing::rule_name);

// Memory of an earlier stream, state included, is kept until a later one is
// done.
TEST(OptimizerDeviceTest, StreamsKeepTheState) {
  testing::RecordingRuntime runtime;
  testing::Pipeline pipeline(Placement::Policy::kShardAll, runtime);
  Entry entry(1, {{4}, at::kHalf, 4});
  pipeline.placement.store(entry, at::ones(4, at::kHalf));
  const at::Tensor somewhere =
      at::empty(4, at::TensorOptions().device(at::kMeta));
  pipeline.placement.place(
      Item{&entry, {}, somewhere, nullptr}, /*may_shard=*/true);
  const at::Tensor gradient = at::ones(4, at::kHalf);
  const Value value(&gradient);
  RuleStep step;
  step.rule = make_rule("test", "adam", {{"amsgrad", 1}});
  const Item item{&entry, value, {}, &step};
  runtime.stream = 1;
  pipeline.reducer.accumulate(item);
  pipeline.reducer.update(item);
  runtime.stream = 2;
  runtime.log.clear();
  pipeline.reducer.update(item);
  // The value, its master, what has accumulated, and three states.
  EXPECT_EQ(std::count(runtime.log.begin(), runtime.log.end(), "keep 2"), 6);
}

} // namespace
} // namespace torchkv

// Timeline: work of several streams on one slice is ordered, and only then.
#include "runtime.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "recording_runtime.h"

namespace torchkv {
namespace {

using Log = std::vector<std::string>;

TEST(TimelineTest, DoesNothingOnTheCpu) {
  testing::RecordingRuntime runtime;
  Timeline timeline;
  timeline.enter(runtime, c10::kCPU, {});
  timeline.leave(runtime, c10::kCPU);
  EXPECT_EQ(runtime.log, Log());
}

TEST(TimelineTest, OneStreamNeverWaits) {
  testing::RecordingRuntime runtime;
  const c10::Device home(c10::kCUDA, 0);
  Timeline timeline;
  for (int i = 0; i < 2; ++i) {
    timeline.enter(runtime, home, {at::ones(1)});
    timeline.leave(runtime, home);
  }
  EXPECT_EQ(runtime.log, (Log{"record 0", "record 0"}));
}

TEST(TimelineTest, AnotherStreamWaitsForTheLastAndKeepsTheMemory) {
  testing::RecordingRuntime runtime;
  const c10::Device home(c10::kCUDA, 0);
  Timeline timeline;
  timeline.enter(runtime, home, {});
  timeline.leave(runtime, home);
  runtime.stream = 7;
  const at::Tensor unallocated;
  timeline.enter(runtime, home, {at::ones(1), unallocated});
  timeline.leave(runtime, home);
  EXPECT_EQ(runtime.log, (Log{"record 0", "wait 7", "keep 7", "record 7"}));
}

TEST(DefaultRuntimeTest, AllocatesNormalTensorsInInferenceMode) {
  const c10::InferenceMode inference(true);
  const at::Tensor tensor =
      default_runtime().allocate({2, 3}, {1, 2}, at::kHalf, c10::kCPU);
  EXPECT_FALSE(tensor.is_inference());
  EXPECT_EQ(tensor.sizes(), (c10::IntArrayRef{2, 3}));
  EXPECT_EQ(tensor.strides(), (c10::IntArrayRef{1, 2}));
  EXPECT_EQ(tensor.scalar_type(), at::kHalf);
}

TEST(DefaultRuntimeTest, CopiesIntoALeafThatRequiresGrad) {
  const at::Tensor leaf = at::zeros(3).set_requires_grad(true);
  default_runtime().copy(leaf, at::arange(3));
  EXPECT_TRUE(at::equal(leaf, at::arange(3).to(at::kFloat)));
  EXPECT_TRUE(leaf.is_leaf());
}

} // namespace
} // namespace torchkv

// The real runtime, on the CPU.
#include "runtime.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace torchkv {
namespace {

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

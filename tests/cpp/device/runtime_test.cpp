// The default runtime, on the CPU.
#include "device/runtime.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

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

// PyTorch's own conversion between float and half drops the sign of such views.
TEST(DefaultRuntimeTest, CopiesNegativeAndConjugateViews) {
  const std::vector<c10::ScalarType> reals{
      at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
  for (const auto from : reals) {
    for (const auto to : reals) {
      const at::Tensor numbers = at::arange(1, 4, from);
      const at::Tensor expected = numbers.to(to).neg();
      const at::Tensor out = at::zeros(3, to);
      default_runtime().copy(out, numbers._neg_view());
      EXPECT_TRUE(at::equal(out, expected)) << from << ' ' << to;
      const at::Tensor base = at::zeros(3, to);
      default_runtime().copy(base._neg_view(), numbers);
      EXPECT_TRUE(at::equal(base, expected)) << from << ' ' << to;
    }
  }
  for (const auto from : {at::kComplexFloat, at::kComplexDouble}) {
    for (const auto to : {at::kComplexFloat, at::kComplexDouble}) {
      const at::Tensor numbers =
          at::complex(at::arange(3.), at::arange(1., 4.)).to(from);
      const at::Tensor expected = numbers.to(to).conj().resolve_conj();
      const at::Tensor out = at::zeros(3, to);
      default_runtime().copy(out, numbers.conj());
      EXPECT_TRUE(at::equal(out, expected)) << from << ' ' << to;
      default_runtime().copy(out, numbers.conj()._neg_view());
      EXPECT_TRUE(at::equal(out, -expected)) << from << ' ' << to;
      const at::Tensor base = at::zeros(3, to);
      default_runtime().copy(base.conj(), numbers);
      EXPECT_TRUE(at::equal(base, expected)) << from << ' ' << to;
    }
  }
}

} // namespace
} // namespace torchkv

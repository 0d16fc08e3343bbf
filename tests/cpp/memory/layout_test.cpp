#include "memory/layout.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace torchkv {
namespace {

TEST(SameLayoutTest, IgnoresStridesOfDimensionsOfSizeOne) {
  const at::Tensor a = at::zeros({4, 1, 3});
  EXPECT_TRUE(same_layout(a, at::ones({4, 1, 3}, at::kDouble)));
  EXPECT_TRUE(same_layout(a, a.as_strided({4, 1, 3}, {3, 99, 1})));
  EXPECT_FALSE(same_layout(a, at::zeros({3, 1, 4}).permute({2, 1, 0})));
  EXPECT_FALSE(same_layout(a, at::zeros({4, 1, 6}).slice(2, 0, 6, 2)));
  EXPECT_FALSE(same_layout(a, at::zeros({1, 1, 3}).expand({4, 1, 3})));
  EXPECT_TRUE(same_layout(at::zeros({}), at::zeros({})));
}

} // namespace
} // namespace torchkv

// The keys and tensors of a call.
#include "store/arguments.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "numbers.h"

namespace torchkv {
namespace {

using testing::number;
using testing::numbers;

TEST(TensorsTest, GroupsAreContiguous) {
  const Tensors tensors({{number(1), number(2)}, {}, {number(3)}});
  ASSERT_EQ(tensors.size(), 3);
  EXPECT_EQ(numbers(tensors.of(0)), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(numbers(tensors.of(1)), (std::vector<int64_t>{}));
  EXPECT_EQ(numbers(tensors.of(2)), (std::vector<int64_t>{3}));
}

TEST(TensorsTest, ReplicasAreOneGroupAndOneEachAreMany) {
  const std::vector<at::Tensor> two{number(1), number(2)};
  EXPECT_EQ(Tensors::replicas(two).size(), 1);
  EXPECT_EQ(Tensors::one_each(two).size(), 2);
  EXPECT_EQ(numbers(Tensors::one_each(two).of(1)), (std::vector<int64_t>{2}));
}

TEST(KeysTest, ContextNamesThreeAtMost) {
  EXPECT_EQ(Keys(3).context(), "(key 3)");
  EXPECT_TRUE(Keys(3).single);
  EXPECT_FALSE(Keys({3}).single);
  EXPECT_EQ(Keys({5, 7, 9}).context(), "(keys 5, 7, 9)");
  EXPECT_EQ(
      Keys({"a", "b", "c", "d"}).context(),
      "(keys 'a', 'b', 'c', ... 4 in all)");
}

} // namespace
} // namespace torchkv

// Key: equality, and its form in error messages.
#include "core/key.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace torchkv {
namespace {

TEST(KeyTest, IntAndStrWithTheSameTextDiffer) {
  EXPECT_EQ(Key(3).kind(), KeyKind::kInt);
  EXPECT_EQ(Key("3").kind(), KeyKind::kStr);
  EXPECT_FALSE(Key(3) == Key("3"));
  EXPECT_FALSE(Key(0) == Key(""));
}

TEST(KeyTest, IntsHave64Bits) {
  constexpr int64_t kLarge = 4294967298; // 2**32 + 2
  EXPECT_FALSE(Key(kLarge) == Key(2));
  EXPECT_EQ(Key(kLarge), Key(kLarge));
  EXPECT_EQ(KeyHash()(Key(kLarge)), KeyHash()(Key(kLarge)));
  EXPECT_EQ(
      Key(std::numeric_limits<int64_t>::min()).context(),
      "(key -9223372036854775808)");
}

TEST(KeyTest, ContextQuotesStr) {
  EXPECT_EQ(Key(-3).context(), "(key -3)");
  EXPECT_EQ(Key("conv1.weight").context(), "(key 'conv1.weight')");
}

} // namespace
} // namespace torchkv

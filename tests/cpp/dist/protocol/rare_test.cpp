#include "dist/protocol/rare.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>

namespace torchkv::dist {
namespace {

using Text = Rare<std::string>;

TEST(RareTest, IsAsAnOptional) {
  Text text;
  EXPECT_FALSE(text);
  EXPECT_EQ(text, std::nullopt);
  text.emplace() = "a";
  EXPECT_TRUE(text.has_value());
  EXPECT_EQ(*text, "a");
  EXPECT_EQ(text->size(), 1U);
  EXPECT_EQ(text, std::string("a"));
  text.reset();
  EXPECT_EQ(text, Text());
  text = std::optional<std::string>("b");
  EXPECT_EQ(std::optional<std::string>(text), "b");
  text = std::nullopt;
  EXPECT_EQ(std::optional<std::string>(text), std::nullopt);
}

TEST(RareTest, CopiesHaveTheirOwnValue) {
  Text text = std::string("a");
  Text copy = text;
  *copy = "b";
  EXPECT_EQ(*text, "a");
  text = copy;
  *copy = "c";
  EXPECT_EQ(*text, "b");
  const Text& same = text;
  text = same;
  EXPECT_EQ(*text, "b");
  const Text moved = std::move(text);
  EXPECT_EQ(*moved, "b");
}

} // namespace
} // namespace torchkv::dist

// A caller's text in error messages, and suggestions.
#include "core/text.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/key.h"

namespace torchkv {
namespace {

std::string repeated(const std::string& part, int count) {
  std::string result;
  for (int i = 0; i < count; ++i) {
    result += part;
  }
  return result;
}

TEST(TextTest, QuotesAndEscapes) {
  EXPECT_EQ(quoted(""), "''");
  EXPECT_EQ(quoted("conv.weight"), "'conv.weight'");
  EXPECT_EQ(quoted(std::string("a\0b", 3)), "'a\\x00b'");
  EXPECT_EQ(quoted("a\nb\x1f\x7f"), "'a\\x0ab\\x1f\\x7f'");
  EXPECT_EQ(quoted("gr\u00fc\u00df \u2603"), "'gr\u00fc\u00df \u2603'");
}

TEST(TextTest, ShortensAbove200Characters) {
  const std::string longest = repeated("x", 200);
  EXPECT_EQ(quoted(longest), "'" + longest + "'");
  const std::string text = repeated("a", 150) + repeated("b", 151);
  EXPECT_EQ(
      quoted(text), "'" + repeated("a", 98) + "..." + repeated("b", 99) + "'");
  EXPECT_EQ(Key(text).context(), "(key " + quoted(text) + ")");
}

// Counts and omits characters, not bytes.
TEST(TextTest, KeepsCharactersOfSeveralBytesWhole) {
  const std::string snowman = "\u2603";
  EXPECT_EQ(quoted(repeated(snowman, 200)), "'" + repeated(snowman, 200) + "'");
  EXPECT_EQ(
      quoted(repeated(snowman, 201)),
      "'" + repeated(snowman, 98) + "..." + repeated(snowman, 99) + "'");
}

TEST(TextTest, SuggestsTheNearestOfSeveral) {
  const std::vector<std::string> names{
      "encoder.weight", "encoder.bias", "decoder.weight"};
  EXPECT_EQ(
      did_you_mean("encoder.wieght", names),
      "; did you mean 'encoder.weight'?");
  EXPECT_EQ(
      did_you_mean("encoder_bias", names), "; did you mean 'encoder.bias'?");
  EXPECT_EQ(
      did_you_mean("decoder.weights", names),
      "; did you mean 'decoder.weight'?");
}

TEST(TextTest, CountsATranspositionAsOneEdit) {
  EXPECT_EQ(did_you_mean("sdg", {"sgd"}), "; did you mean 'sgd'?");
  EXPECT_EQ(did_you_mean("gsd", {"dgs"}), "");
}

TEST(TextTest, SuggestsNothingIfNothingIsNear) {
  EXPECT_EQ(did_you_mean("momentum", {"encoder.weight", "lr"}), "");
  EXPECT_EQ(did_you_mean("", {"lr"}), "");
  EXPECT_EQ(did_you_mean("lr", {}), "");
  EXPECT_EQ(did_you_mean("a", {"b"}), "");
  EXPECT_EQ(did_you_mean("ab", {"ac"}), "; did you mean 'ac'?");
  // Longer texts are not compared.
  const std::string longest = repeated("x", 200);
  EXPECT_NE(did_you_mean(longest, {longest + "y"}), "");
  EXPECT_EQ(did_you_mean(longest + "x", {longest + "y"}), "");
}

} // namespace
} // namespace torchkv

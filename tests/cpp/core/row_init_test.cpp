// Initial values of rows by name: their parameters, and what is refused.
#include "core/row_init.h"

#include <gtest/gtest.h>

#include <limits>

#include "error_text.h"

namespace torchkv {
namespace {

using testing::error_text;

TEST(RowInitTest, HaveNamesAndParameters) {
  for (const char* name : {"zeros", "normal", "uniform"}) {
    const RowInit init = make_row_init("op", name, {}, 7);
    EXPECT_STREQ(name_of(init), name);
    EXPECT_EQ(init.seed, 7);
    const RowInit again = make_row_init("op", name, numbers_of(init), 7);
    EXPECT_EQ(numbers_of(again), numbers_of(init)) << name;
  }
  EXPECT_EQ(make_row_init("op", "normal", {{"std", 0.5}}, 0).std, 0.5);
  EXPECT_EQ(make_row_init("op", "uniform", {{"low", -2}}, 0).low, -2);
}

TEST(RowInitTest, RefuseWhatTheyDoNotHave) {
  const auto refused = [](const char* name, const NumbersByName& numbers) {
    return error_text<c10::ValueError>(
        [&] { make_row_init("op", name, numbers, 0); });
  };
  EXPECT_NE(refused("normla", {}).find("did you mean"), std::string::npos);
  EXPECT_NE(refused("zeros", {{"std", 1}}).find("std"), std::string::npos);
  EXPECT_NE(refused("normal", {{"low", 1}}).find("low"), std::string::npos);
  EXPECT_NE(
      refused("normal", {{"std", -1}}).find("at least 0"), std::string::npos);
  EXPECT_NE(
      refused("uniform", {{"low", 1}, {"high", 0}}).find("at most high"),
      std::string::npos);
  EXPECT_NE(
      refused("normal", {{"mean", std::numeric_limits<double>::infinity()}})
          .find("finite"),
      std::string::npos);
}

} // namespace
} // namespace torchkv

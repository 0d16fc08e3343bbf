// Numbers of an optimizer that are invalid because fp32 cannot represent them.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "error_text.h"
#include "update/optimizer.h"

namespace torchkv {
namespace {

std::string refusal(const Optimizer& optimizer) {
  return testing::error_text([&] { check_optimizer("test", optimizer); });
}

std::string refusal(const char* name, double value) {
  return refusal(
      {{make_rule("test", "sgd", {})},
       {},
       make_gradient("test", {{name, value}})});
}

TEST(CheckOptimizerTest, GradientOptions) {
  for (const char* name : {"rescale_grad", "clip_value", "max_norm"}) {
    for (const double value : {double(NAN), double(INFINITY), 3.5e38}) {
      EXPECT_EQ(refusal(name, value).rfind("test: expected a ", 0), 0)
          << name << ' ' << value;
    }
    EXPECT_EQ(refusal(name, 3.4e38), "no error") << name;
  }
  EXPECT_NE(
      refusal("clip_value", 1e-50).find("not 0 in fp32"), std::string::npos);
  EXPECT_EQ(refusal("clip_value", 0), "no error");
  EXPECT_EQ(refusal("clip_value", 1e-44), "no error");
}

TEST(CheckOptimizerTest, Multipliers) {
  const auto with = [](double lr_mult, double wd_mult) {
    return refusal(
        {{make_rule("test", "sgd", {{"lr", 1e30}, {"weight_decay", 1e30}})},
         {{3, {0, lr_mult, wd_mult}}},
         {}});
  };
  EXPECT_EQ(with(1e8, 0), "no error");
  EXPECT_EQ(with(0, 1e8), "no error");
  for (const double bad : {-1.0, 1e9, double(NAN), double(INFINITY)}) {
    for (const auto& text : {with(bad, 1), with(1, bad)}) {
      EXPECT_NE(text.find("multipliers of at least 0"), std::string::npos)
          << bad;
      EXPECT_NE(text.find("(key 3)"), std::string::npos) << bad;
    }
  }
}

} // namespace
} // namespace torchkv

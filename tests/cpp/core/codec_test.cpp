// Codecs by name: their options, and what is refused.
#include "core/codec.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "error_text.h"

namespace torchkv {
namespace {

using testing::error_text;

TEST(CodecTest, HaveNamesAndOptions) {
  for (const char* name :
       {"none", "1bit", "2bit", "fp16", "bf16", "fp8", "int4", "topk"}) {
    const Codec codec = make_codec("op", name, {});
    EXPECT_STREQ(name_of(codec), name);
    const Codec again = make_codec("op", name, numbers_of(codec));
    EXPECT_EQ(numbers_of(again), numbers_of(codec)) << name;
  }
  EXPECT_EQ(make_codec("op", "2bit", {{"threshold", 0.25}}).threshold, 0.25);
  EXPECT_EQ(make_codec("op", "1bit", {{"threshold", -1}}).threshold, -1);
  EXPECT_EQ(make_codec("op", "int4", {{"seed", 7}}).seed, 7);
}

TEST(CodecTest, TopKSendsAtLeastOneAndAtMostAll) {
  const auto sent = [](const NumbersByName& numbers, int64_t num_elements) {
    return make_codec("op", "topk", numbers).num_sent(num_elements);
  };
  EXPECT_EQ(sent({}, 1000), 10);
  EXPECT_EQ(sent({}, 1001), 11);
  EXPECT_EQ(sent({}, 1), 1);
  EXPECT_EQ(sent({}, 0), 0);
  EXPECT_EQ(sent({{"ratio", 1}}, 77), 77);
  EXPECT_EQ(sent({{"k", 5}}, 1000), 5);
  EXPECT_EQ(sent({{"k", 5}}, 3), 3);
}

TEST(CodecTest, RefusesWhatIsInvalid) {
  const auto refused = [](const std::string& name,
                          const NumbersByName& numbers) {
    return error_text([&] { (void)make_codec("op", name, numbers); });
  };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(
      refused("2bits", {}).find("op: unknown compression '2bits'"),
      std::string::npos);
  EXPECT_NE(refused("2bits", {}).find("mean '2bit'"), std::string::npos);
  EXPECT_NE(
      refused("fp16", {{"k", 1}}).find("'k' for compression 'fp16'"),
      std::string::npos);
  for (const double threshold : {0.0, -1.0, kNan, 1e39, 1e-50}) {
    EXPECT_NE(refused("2bit", {{"threshold", threshold}}), "") << threshold;
  }
  EXPECT_NE(refused("1bit", {{"threshold", kNan}}), "");
  for (const double k : {0.0, -1.0, 1.5, kNan}) {
    EXPECT_NE(refused("topk", {{"k", k}}), "") << k;
  }
  for (const double ratio : {0.0, -0.5, 1.25, kNan}) {
    EXPECT_NE(refused("topk", {{"ratio", ratio}}), "") << ratio;
  }
  EXPECT_NE(refused("topk", {{"k", 1}, {"ratio", 0.5}}), "");
}

} // namespace
} // namespace torchkv

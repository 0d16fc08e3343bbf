// Store types: exact names, MXNet's aliases, and what an error suggests.
#include "store/registry.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

namespace torchkv {
namespace {

std::string refusal(const std::string& text) {
  try {
    canonical_type(text);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no ValueError";
}

TEST(RegistryTest, AliasesResolveToTheirTypes) {
  EXPECT_EQ(canonical_type("local"), "local");
  EXPECT_EQ(canonical_type("local_update_cpu"), "local");
  EXPECT_EQ(canonical_type("local_allreduce_cpu"), "local");
  EXPECT_EQ(canonical_type("device"), "device");
  EXPECT_EQ(canonical_type("local_allreduce_device"), "device");
}

TEST(RegistryTest, SuggestsTheNearestName) {
  EXPECT_NE(refusal("LOCAL").find("did you mean 'local'?"), std::string::npos);
  EXPECT_NE(
      refusal("devcie").find("did you mean 'device'?"), std::string::npos);
  EXPECT_NE(
      refusal("dist-sync").find("did you mean 'dist_sync'?"),
      std::string::npos);
}

TEST(RegistryTest, SuggestsNothingIfNothingIsNear) {
  EXPECT_EQ(refusal("redis").find("did you mean"), std::string::npos);
  EXPECT_EQ(refusal("").find("did you mean"), std::string::npos);
  EXPECT_NE(refusal("redis").find("'dist_device_sync'"), std::string::npos);
}

TEST(RegistryTest, NeverMatchesASubstring) {
  EXPECT_NE(refusal("my_device_store"), "no ValueError");
  EXPECT_NE(refusal("local "), "no ValueError");
}

TEST(RegistryTest, FutureTypesAreNotImplemented) {
  for (const auto* type :
       {"dist", "dist_sync", "dist_async", "dist_device_sync"}) {
    EXPECT_THROW(canonical_type(type), c10::NotImplementedError) << type;
  }
}

} // namespace
} // namespace torchkv

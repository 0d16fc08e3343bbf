// Store types: exact names, MXNet's aliases, what an error suggests, and types
// that programs add.
#include "store/registry.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "error_text.h"
#include "kvstore.h"
#include "store/local_store.h"

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
  EXPECT_NE(refusal("redis").find("'device'"), std::string::npos);
  EXPECT_EQ(refusal("redis").find("'dist_device_sync'"), std::string::npos);
}

TEST(RegistryTest, NeverMatchesASubstring) {
  EXPECT_NE(refusal("my_device_store"), "no ValueError");
  EXPECT_NE(refusal("local "), "no ValueError");
}

TEST(RegistryTest, FutureTypesAreNotImplemented) {
  EXPECT_THROW(canonical_type("dist_device_sync"), c10::NotImplementedError);
}

TEST(RegistryTest, KnowsTheTypesOfSeveralMachines) {
  EXPECT_EQ(canonical_type("dist"), "dist_sync");
  EXPECT_EQ(canonical_type("dist_sync"), "dist_sync");
  EXPECT_EQ(canonical_type("dist_async"), "dist_async");
}

TEST(RegistryTest, AnAddedTypeIsOneLikeTheOthers) {
  const auto make = [](Runtime& runtime, const StoreOptions& /*options*/) {
    return std::make_unique<LocalStore>(runtime, LocalStore::Options());
  };
  register_store("ring", make);
  EXPECT_EQ(canonical_type("ring"), "ring");
  EXPECT_NE(refusal("redis").find(", 'ring'"), std::string::npos);
  EXPECT_NE(refusal("Rings").find("did you mean 'ring'?"), std::string::npos);
  const auto store = c10::make_intrusive<KVStore>("ring");
  store->init(1, at::ones(2));
  EXPECT_EQ(KVStore::from_state(store->state())->type(), "ring");
  EXPECT_NE(replace_store("ring", {}), nullptr);
  EXPECT_EQ(refusal("redis").find("'ring'"), std::string::npos);
  EXPECT_NE(refusal("ring"), "no ValueError");
  EXPECT_EQ(store->repr(), "KVStore(type='ring', keys=1, bytes=8)");
}

TEST(RegistryTest, ANameThatIsTakenIsRefused) {
  const auto refused = [](const std::string& type, const MakeStore& make) {
    return testing::error_text([&] { register_store(type, make); });
  };
  const MakeStore make = [](Runtime& runtime, const StoreOptions& options) {
    return make_store("local", runtime, options);
  };
  register_store("my own", make);
  for (const char* const type :
       {"my own", "local", "dist_sync", "dist", "local_update_cpu"}) {
    EXPECT_NE(
        refused(type, make)
            .find(
                "register_store: expected a new name, but there is a store type '" +
                std::string(type)),
        std::string::npos)
        << type;
  }
  EXPECT_NE(refused("", make).find("an empty name"), std::string::npos);
  EXPECT_NE(refused("x", {}).find("an empty function"), std::string::npos);
  EXPECT_EQ(KVStore("my own").type(), "my own");
  EXPECT_NE(replace_store("my own", {}), nullptr);
}

TEST(RegistryTest, ABuiltInTypeCanBeReplacedAndRemoved) {
  int num_made = 0;
  const MakeStore before = replace_store("device", {});
  EXPECT_THROW(canonical_type("device"), c10::NotImplementedError);
  EXPECT_THROW(
      canonical_type("local_allreduce_device"), c10::NotImplementedError);
  replace_store("device", [&](Runtime& runtime, const StoreOptions& options) {
    ++num_made;
    return before(runtime, options);
  });
  EXPECT_EQ(KVStore("local_allreduce_device").type(), "device");
  EXPECT_EQ(num_made, 1);
  replace_store("device", before);
}

} // namespace
} // namespace torchkv

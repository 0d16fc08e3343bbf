// A store whose calls run on a thread of its own is like any other.
#include "forwarding_store.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>

#include "core/errors.h"
#include "error_text.h"
#include "function_updater.h"
#include "kvstore.h"
#include "store/local_store.h"
#include "store/registry.h"

namespace torchkv {
namespace {

using testing::error_text;
using testing::updater_of;

// Stores of the type "forwarding", which exists as long as the test.
class ForwardingStoreTest : public ::testing::Test {
 protected:
  ForwardingStoreTest() {
    replace_store(
        "forwarding", [](Runtime& runtime, const StoreOptions& /*options*/) {
          return std::make_unique<LocalStore>(runtime, LocalStore::Options());
        });
    testing::forward_stores_of("forwarding");
  }
  ~ForwardingStoreTest() override {
    replace_store("forwarding", {});
  }
  // With a value of two zeros.
  static c10::intrusive_ptr<KVStore> make() {
    auto store = c10::make_intrusive<KVStore>("forwarding");
    store->init(1, at::zeros(2));
    return store;
  }
  static std::string push_error(KVStore& store) {
    return error_text<c10::Error>([&] { store.push(1, at::ones(2)); });
  }
  // An updater that pushes to `store`.
  static std::shared_ptr<OpaqueUpdater> pushing_to(KVStore& store) {
    return updater_of([&store](auto& input, auto& /*stored*/) {
      store.push(1, input.clone());
    });
  }
};

TEST_F(ForwardingStoreTest, ReturnsAndThrowsWhatTheOtherDoes) {
  const auto store = make();
  EXPECT_EQ(store->type(), "forwarding");
  EXPECT_EQ(store->push(1, at::ones(2)), nullptr);
  EXPECT_TRUE(at::equal(store->pull(1)[0], at::ones(2)));
  EXPECT_EQ(store->repr(), "KVStore(type='forwarding', keys=1, bytes=8)");
  EXPECT_THROW(store->push(3, at::ones(2)), UnknownKeyError);
  EXPECT_THROW(store->push(1, at::ones(3)), c10::ValueError);
  const auto other = c10::make_intrusive<KVStore>("forwarding");
  other->init({7, 8}, Tensors::one_each({at::ones(2), at::ones(3)}));
  store->take(*other);
  EXPECT_EQ(store->keys(), (std::vector<Key>{7, 8}));
  EXPECT_EQ(other->repr(), "KVStore(type='forwarding', closed)");
  EXPECT_THROW(other->size(), c10::Error);
}

TEST_F(ForwardingStoreTest, RefusesCallsFromItsUpdater) {
  const auto store = make();
  const auto other = make();
  const std::string expected =
      "push: unexpected call of a store from inside its own updater";
  store->set_updater(pushing_to(*store));
  EXPECT_EQ(push_error(*store), expected);
  // By way of another store, on whose thread the call is made.
  store->set_updater(pushing_to(*other));
  other->set_updater(pushing_to(*store));
  EXPECT_EQ(push_error(*store), expected);
}

TEST_F(ForwardingStoreTest, RefusesAnUpdaterThatIsRunning) {
  const auto store = make();
  const auto other = make();
  const auto both = pushing_to(*other);
  store->set_updater(both);
  other->set_updater(both);
  EXPECT_NE(
      push_error(*store).find("push: unexpected recursion"), std::string::npos);
}

struct CountingHandler final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {
    ++count;
  }
  int count = 0;
};

TEST_F(ForwardingStoreTest, RunsOnItsThreadInTheCallersModes) {
  constexpr auto kKey = c10::DispatchKey::Tracer;
  const auto store = make();
  std::thread::id thread;
  bool is_excluded = false;
  store->set_updater(updater_of([&](auto& input, auto& stored) {
    thread = std::this_thread::get_id();
    is_excluded = c10::impl::tls_is_dispatch_key_excluded(kKey);
    TORCH_WARN("of the updater");
    stored.add_(input);
  }));
  CountingHandler warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
    store->push(1, at::ones(2));
  }
  EXPECT_NE(thread, std::this_thread::get_id());
  EXPECT_TRUE(is_excluded);
  EXPECT_EQ(warnings.count, 1);
  store->push(1, at::ones(2));
  EXPECT_FALSE(is_excluded);
}

} // namespace
} // namespace torchkv

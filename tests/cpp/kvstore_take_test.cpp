// KVStore::take: takes all of another store at once or, on an error, nothing;
// calls in flight finish on the values and the updater that they began with.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "kvstore.h"
#include "optimizer_helpers.h"

namespace torchkv {
namespace {

using testing::expect_equal;
using testing::optimizer;
using testing::state_of;
using testing::Store;
using testing::value_of;

at::Tensor filled(double value) {
  return at::full(3, value, at::kFloat);
}

Store store_of(const std::vector<std::pair<Key, double>>& values) {
  const auto store = c10::make_intrusive<KVStore>();
  for (const auto& [key, value] : values) {
    store->init(key, filled(value));
  }
  return store;
}

// stored += input, for int keys, after a call of a function of the test.
class AddTo final : public OpaqueUpdater {
 public:
  explicit AddTo(std::function<void()> inside) : inside_(std::move(inside)) {}

  void update(
      const Key& /*key*/,
      const at::Tensor& input,
      const at::Tensor& stored) override {
    inside_();
    stored.add_(input);
    result = stored.clone();
  }
  std::optional<KeyKind> key_kind() const override {
    return KeyKind::kInt;
  }
  at::Tensor serialize() const override {
    return {};
  }

  at::Tensor result;

 private:
  std::function<void()> inside_;
};

std::shared_ptr<AddTo> add_to() {
  return std::make_shared<AddTo>([] {});
}

void expect_closed(const Store& store) {
  EXPECT_THROW(store->size(), c10::Error);
}

TEST(KVStoreTakeTest, TakesKeysAndValuesAndClosesTheOther) {
  const auto store = store_of({{1, 10}, {2, 20}});
  const auto other = store_of({{7, 70}, {2, 200}});
  other->push(2, filled(201));
  store->take(*other);
  expect_closed(other);
  EXPECT_EQ(store->keys(), (std::vector<Key>{7, 2}));
  expect_equal(value_of(store, 7), filled(70));
  expect_equal(value_of(store, 2), filled(201));
  EXPECT_EQ(store->state().versions, (std::vector<int64_t>{0, 1}));
}

TEST(KVStoreTakeTest, TakesTheUpdater) {
  const auto store = store_of({{1, 10}});
  const auto old = add_to();
  store->set_updater(old);
  const auto other = store_of({{1, 100}});
  other->set_optimizer(optimizer(
      "sgd", {{"lr", 1}, {"momentum", 0.5}}, {{"skip_nonfinite", 1}}));
  other->push(1, filled(4));
  other->push(1, filled(NAN));
  store->take(*other);
  EXPECT_EQ(old.use_count(), 1);
  EXPECT_EQ(store->num_skipped(), 1);
  EXPECT_EQ(state_of(store).step, 1);
  store->push(1, filled(2)); // 100 - 4 - (0.5 * 4 + 2)
  expect_equal(value_of(store), filled(92));

  store->take(*store_of({{1, 5}})); // ASSIGN
  EXPECT_EQ(store->num_skipped(), 0);
  store->push(1, filled(6));
  expect_equal(value_of(store), filled(6));
}

TEST(KVStoreTakeTest, KeepsItsUpdater) {
  const auto store = store_of({{1, 10}});
  const auto updater = add_to();
  store->set_updater(updater);
  const auto other = store_of({{7, 70}});
  other->set_optimizer(optimizer("sgd", {{"lr", 1}}));
  store->take(*other, /*keeps_updater=*/true);
  expect_closed(other);
  store->push(7, filled(1));
  expect_equal(value_of(store, 7), filled(71));
  expect_equal(updater->result, filled(71));

  const StoreState state =
      store->state(/*with_keys=*/true, /*with_updater=*/false);
  EXPECT_TRUE(state.updater.empty());
  const auto copy = KVStore::from_state(state);
  copy->push(7, filled(1)); // ASSIGN
  expect_equal(value_of(copy, 7), filled(1));
  EXPECT_EQ(copy->state().versions, (std::vector<int64_t>{2}));
}

TEST(KVStoreTakeTest, KeepsItsOptimizerWithoutTheOthersState) {
  const auto store = store_of({{1, 10}});
  store->set_optimizer(optimizer("sgd", {{"lr", 1}, {"momentum", 0.5}}));
  const auto other = store_of({{1, 100}});
  other->set_optimizer(optimizer("sgd", {{"lr", 2}, {"momentum", 0.5}}));
  other->push(1, filled(4)); // 92, with a momentum of 4
  store->take(*other, /*keeps_updater=*/true);
  store->push(1, filled(2));
  store->push(1, filled(2)); // 92 - 2 - (0.5 * 2 + 2)
  expect_equal(value_of(store), filled(87));
  EXPECT_EQ(state_of(store).step, 2);
}

TEST(KVStoreTakeTest, KeepsNoUpdaterThatTheOthersKeysDoNotFit) {
  const auto store = c10::make_intrusive<KVStore>();
  store->set_updater(add_to()); // of int keys
  const auto other = store_of({{"w", 70}});
  EXPECT_THROW(store->take(*other, /*keeps_updater=*/true), c10::TypeError);
  expect_equal(value_of(other, "w"), filled(70));
  store->init(1, filled(10));
}

TEST(KVStoreTakeTest, RejectsKeysOfTheOtherKind) {
  const auto store = store_of({{1, 10}});
  const auto updater = add_to();
  store->set_updater(updater);
  const auto other = store_of({{"w", 70}});
  other->set_optimizer(optimizer("sgd", {}));
  EXPECT_THROW(store->take(*other), c10::TypeError);
  expect_equal(value_of(other, "w"), filled(70));
  EXPECT_EQ(state_of(other, "w").step, 0); // it has its optimizer
  store->push(1, filled(1));
  expect_equal(value_of(store), filled(11));
}

// The kind stays fixed, even without keys.
TEST(KVStoreTakeTest, RejectsAnUpdaterForKeysOfTheOtherKind) {
  const auto store = store_of({{"w", 10}});
  const auto other = c10::make_intrusive<KVStore>();
  other->set_updater(add_to());
  EXPECT_THROW(store->take(*other), c10::TypeError);
  store->push("w", filled(1)); // ASSIGN
  expect_equal(value_of(store, "w"), filled(1));
  other->init(1, filled(2));
  other->push(1, filled(3));
  expect_equal(value_of(other), filled(5));
}

TEST(KVStoreTakeTest, AClosedStoreTakesNothing) {
  const auto store = store_of({{1, 10}});
  const auto other = store_of({{1, 70}});
  store->close();
  EXPECT_THROW(store->take(*other), c10::Error);
  expect_equal(value_of(other), filled(70));
}

// A push whose updater is running finishes with the old value and updater, and
// affects neither of the new ones.
TEST(KVStoreTakeTest, APushInFlightFinishesOnTheOldStore) {
  const auto store = store_of({{1, 10}});
  const auto other = store_of({{1, 70}});
  const auto updater = std::make_shared<AddTo>([&] {
    // In another thread: this one is inside the store.
    std::thread([&] { store->take(*other); }).join();
  });
  store->set_updater(updater);
  store->push(1, filled(1));
  expect_equal(updater->result, filled(11));
  EXPECT_EQ(updater.use_count(), 1);
  expect_equal(value_of(store), filled(70));
  EXPECT_EQ(store->state().versions, (std::vector<int64_t>{0}));
}

TEST(KVStoreTakeTest, RunsBesidePushesAndPulls) {
  const auto store = store_of({{1, 1}, {2, 1}});
  const Keys keys{1, 2};
  std::atomic<bool> done{false};
  std::thread pusher([&] {
    while (!done) {
      store->push(keys, Tensors::one_each({filled(1), filled(1)}));
    }
  });
  std::thread puller([&] {
    while (!done) {
      for (const auto& value : store->pull(keys)) {
        EXPECT_TRUE(at::equal(value, filled(1)) || at::equal(value, filled(2)))
            << value;
      }
    }
  });
  for (int i = 0; i < 300; ++i) {
    store->take(*store_of({{1, 2}, {2, 2}}));
  }
  done = true;
  pusher.join();
  puller.join();
  store->take(*store_of({{1, 2}, {2, 2}}));
  expect_equal(value_of(store, 1), filled(2));
  expect_equal(value_of(store, 2), filled(2));
}

} // namespace
} // namespace torchkv

// Calls with lists of keys: one pass over all of them, atomic per key, and no
// blocking on one key while holding another.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "kvstore.h"

namespace torchkv {
namespace {

constexpr std::chrono::seconds kPatience(30);

Keys keys_from(int64_t begin, int64_t end) {
  Keys keys;
  keys.single = false;
  for (int64_t key = begin; key < end; ++key) {
    keys.list.emplace_back(key);
  }
  return keys;
}

Keys reversed(const Keys& keys) {
  Keys result = keys;
  std::reverse(result.list.begin(), result.list.end());
  return result;
}

Tensors repeat(const at::Tensor& tensor, int64_t count) {
  return Tensors::one_each(std::vector<at::Tensor>(count, tensor));
}

// The number in all elements, or NaN for a torn value.
double number_in(const at::Tensor& tensor) {
  const auto first = tensor.flatten()[0];
  return at::equal(tensor, first.expand(tensor.sizes())) ? first.item<double>()
                                                         : NAN;
}

// With a gradient of -1, a push adds 1.
Optimizer counting() {
  return {{make_rule("test", "sgd", {{"lr", 1}})}, {}, {}};
}

class Event {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    is_set_ = true;
    changed_.notify_all();
  }
  bool wait() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return is_set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

// Blocks in its first call, which holds the entry, until released.
class Blocking final : public OpaqueUpdater {
 public:
  void update(
      const Key& /*key*/,
      const at::Tensor& input,
      const at::Tensor& stored) override {
    inside.set();
    EXPECT_TRUE(go_on.wait());
    stored.copy_(input);
  }
  std::optional<KeyKind> key_kind() const override {
    return std::nullopt;
  }
  at::Tensor serialize() const override {
    return {};
  }

  Event inside;
  Event go_on;
};

// A store of keys 0 to 9, of zeros, whose entry of one key a thread holds until
// release(). Its updater is ASSIGN meanwhile.
class HeldKey {
 public:
  explicit HeldKey(int64_t key) {
    store->init(keys_from(0, 10), repeat(at::zeros(5), 10));
    store->set_updater(updater_);
    holder_ = std::thread([this, key] { store->push(key, at::full(5, 99.)); });
    EXPECT_TRUE(updater_->inside.wait());
    store->set_updater(nullptr);
  }
  ~HeldKey() {
    release();
  }
  HeldKey(const HeldKey&) = delete;
  HeldKey& operator=(const HeldKey&) = delete;
  HeldKey(HeldKey&&) = delete;
  HeldKey& operator=(HeldKey&&) = delete;

  void release() {
    updater_->go_on.set();
    if (holder_.joinable()) {
      holder_.join();
    }
  }

  const c10::intrusive_ptr<KVStore> store = c10::make_intrusive<KVStore>();

 private:
  const std::shared_ptr<Blocking> updater_ = std::make_shared<Blocking>();
  std::thread holder_;
};

bool comes_true(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

TEST(KVStoreListsTest, APushStopsAtAHeldKeyAndHoldsNoneWhileItWaits) {
  HeldKey held(4);
  std::atomic<bool> done{false};
  std::thread pusher([&] {
    held.store->push(keys_from(0, 10), repeat(at::full(5, 7.), 10));
    done = true;
  });
  EXPECT_TRUE(comes_true([&] {
    return number_in(held.store->pull(3)[0]) == 7;
  })) << "a key before the held one waited for it";
  // All other keys are available to other calls.
  const Keys others{0, 1, 2, 3, 5, 6, 7, 8, 9};
  held.store->push(others, repeat(at::full(5, 3.), 9));
  for (const auto& value : held.store->pull(others)) {
    EXPECT_EQ(number_in(value), 3);
  }
  EXPECT_FALSE(done);
  held.release();
  pusher.join();
  const auto values = held.store->pull(keys_from(0, 10));
  for (int key = 0; key < 10; ++key) {
    EXPECT_EQ(number_in(values[key]), key < 4 ? 3 : 7) << "key " << key;
  }
}

TEST(KVStoreListsTest, APullStopsAtAHeldKeyAndWaits) {
  HeldKey held(4);
  std::vector<at::Tensor> outs;
  for (int i = 0; i < 10; ++i) {
    outs.push_back(at::full(5, -1.));
  }
  const auto version = outs[0]._version();
  std::atomic<bool> done{false};
  std::thread puller([&] {
    held.store->pull(keys_from(0, 10), Tensors::one_each(outs));
    done = true;
  });
  EXPECT_TRUE(comes_true([&] { return outs[3]._version() > version; }));
  held.store->push(9, at::full(5, 3.));
  EXPECT_FALSE(done);
  held.release();
  puller.join();
  EXPECT_EQ(number_in(outs[0]), 0);
  EXPECT_EQ(number_in(outs[4]), 99);
  EXPECT_EQ(number_in(outs[9]), 3);
}

// Whichever key is held, at any position in the list.
TEST(KVStoreListsTest, TheLastKeyOfASharedOutWinsEvenIfAnotherIsHeld) {
  for (const int64_t key : {0, 1, 2}) {
    HeldKey held(key);
    held.store->push(5, at::full(5, 55.));
    const at::Tensor out = at::full(5, -1.);
    std::thread puller([&] { held.store->pull({0, 1, 2, 5}, repeat(out, 4)); });
    // Long enough to get to the lock; the result must not depend on it.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    held.release();
    puller.join();
    EXPECT_EQ(number_in(out), 55) << "key " << key << " was held";
  }
}

TEST(KVStoreListsTest, ListsInOppositeOrdersNeitherDeadlockNorLosePushes) {
  constexpr int kThreads = 4;
  constexpr int kPushes = 300;
  constexpr int64_t kKeys = 40;
  const auto store = c10::make_intrusive<KVStore>();
  const Keys keys = keys_from(0, kKeys);
  store->init(keys, repeat(at::zeros(3), kKeys));
  store->set_optimizer(counting());
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const Keys mine = t % 2 == 0 ? keys : reversed(keys);
      const auto values = repeat(at::full(3, -1.), kKeys);
      for (int i = 0; i < kPushes; ++i) {
        store->push(mine, values);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (const auto& value : store->pull(keys)) {
    EXPECT_EQ(number_in(value), kThreads * kPushes);
  }
}

TEST(KVStoreListsTest, LongListsOfSeveralThreadsAreAtomicPerKey) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 6;
  constexpr int64_t kKeys = 5000; // more than one range
  const auto store = c10::make_intrusive<KVStore>();
  const Keys keys = keys_from(0, kKeys);
  store->init(keys, repeat(at::zeros(17), kKeys));
  store->set_optimizer(counting());
  std::atomic<int> torn{0};
  std::atomic<int> lost{0};
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const Keys mine = t % 2 == 0 ? keys : reversed(keys);
      const at::Tensor minus_one = at::full(17, -1.);
      const auto values = repeat(minus_one, kKeys);
      for (int round = 0; round < kRounds; ++round) {
        store->push(mine, values);
        for (const auto& value : store->pull(mine)) {
          const double number = number_in(value);
          torn += std::isnan(number);
          lost += number < round + 1; // it sees its own pushes
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(lost, 0);
  for (const auto& value : store->pull(keys)) {
    ASSERT_EQ(number_in(value), kThreads * kRounds);
  }
}

TEST(KVStoreListsTest, MoreKeysThanOneRangeHolds) {
  constexpr int64_t kKeys = 9001;
  const auto store = c10::make_intrusive<KVStore>();
  const Keys keys = keys_from(0, kKeys);
  store->init(keys, repeat(at::zeros(2), kKeys));
  std::vector<at::Tensor> values;
  for (int64_t key = 0; key < kKeys; ++key) {
    values.push_back(at::full(2, static_cast<double>(key)));
  }
  store->push(keys, Tensors::one_each(values));
  std::vector<at::Tensor> outs;
  for (int64_t key = 0; key < kKeys; ++key) {
    outs.push_back(at::empty(2));
  }
  store->pull(keys, Tensors::one_each(outs));
  for (int64_t key = 0; key < kKeys; ++key) {
    ASSERT_EQ(number_in(outs[key]), key);
  }
  EXPECT_EQ(store->state().versions, std::vector<int64_t>(kKeys, 1));
  // All into one out: the last key of the last range wins.
  const at::Tensor out = at::empty(2);
  store->pull(keys, repeat(out, kKeys));
  EXPECT_EQ(number_in(out), kKeys - 1);
}

TEST(KVStoreListsTest, MoreBytesThanOneRangeMoves) {
  constexpr int64_t kKeys = 5;
  constexpr int kReplicas = 15;
  const auto store = c10::make_intrusive<KVStore>();
  const Keys keys = keys_from(0, kKeys);
  // With its 15 replicas and the result, half of what a range moves.
  constexpr int64_t kBytes = 8 << 20;
  store->init(keys, repeat(at::zeros(kBytes, at::kByte), kKeys));
  std::vector<std::vector<at::Tensor>> values;
  for (int64_t key = 0; key < kKeys; ++key) {
    const at::Tensor value = at::full(kBytes, key + 1, at::kByte);
    values.emplace_back(kReplicas, value);
  }
  store->push(keys, Tensors(values));
  const auto pulled = store->pull(keys);
  for (int64_t key = 0; key < kKeys; ++key) {
    EXPECT_EQ(number_in(pulled[key]), kReplicas * (key + 1));
  }
  EXPECT_EQ(store->state().versions, std::vector<int64_t>(kKeys, 1));
}

} // namespace
} // namespace torchkv

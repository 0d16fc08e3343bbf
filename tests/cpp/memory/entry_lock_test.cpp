// Entry locks: work on two keys is concurrent, work on one key and calls of an
// opaque updater are not.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "kvstore.h"
#include "recording_runtime.h"

namespace torchkv {
namespace {

// Counts concurrent threads and, on request, holds each until a second one
// arrives or a timeout.
class Meeting {
 public:
  void enter_and_leave(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    ++inside_;
    most_ = std::max(most_, inside_);
    changed_.notify_all();
    changed_.wait_for(lock, patience, [&] { return most_ > 1; });
    --inside_;
  }
  int most() {
    const std::lock_guard lock(mutex_);
    return most_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0;
  int most_ = 0;
};

// Pushes to two keys from two threads while every copy waits for a second. A
// conjugated value makes the reduction use Runtime::copy.
int most_at_once(
    const Key& first,
    const Key& second,
    std::chrono::milliseconds patience) {
  testing::RecordingRuntime runtime;
  const auto store = c10::make_intrusive<KVStore>("local", runtime);
  const at::Tensor zero = at::zeros(4, at::kComplexFloat);
  store->init({1, 2}, Tensors::one_each({zero, zero}));
  Meeting meeting;
  runtime.on_copy = [&] { meeting.enter_and_leave(patience); };
  const at::Tensor value = at::ones(4, at::kComplexFloat).conj();
  std::thread other([&] { store->push(first, value); });
  store->push(second, value);
  other.join();
  return meeting.most();
}

TEST(EntryLockTest, TwoKeysAreConcurrent) {
  // Ends as soon as both are inside.
  EXPECT_EQ(most_at_once(1, 2, std::chrono::seconds(30)), 2);
}

TEST(EntryLockTest, OneKeyIsExclusive) {
  EXPECT_EQ(most_at_once(1, 1, std::chrono::milliseconds(200)), 1);
}

class Counting final : public OpaqueUpdater {
 public:
  void update(
      const Key& /*key*/,
      const at::Tensor& input,
      const at::Tensor& stored) override {
    meeting.enter_and_leave(std::chrono::milliseconds(0));
    stored.add_(input);
  }
  std::optional<KeyKind> key_kind() const override {
    return std::nullopt;
  }
  at::Tensor serialize() const override {
    return {};
  }
  Meeting meeting;
};

TEST(EntryLockTest, AnOpaqueUpdaterIsExclusiveAndLosesNoPush) {
  constexpr int kThreads = 8;
  constexpr int kPushes = 200;
  const auto store = c10::make_intrusive<KVStore>();
  store->init(
      {0, 1, 2}, Tensors::one_each({at::zeros(5), at::zeros(5), at::zeros(5)}));
  const auto updater = std::make_shared<Counting>();
  store->set_updater(updater);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kPushes; ++i) {
        store->push((t + i) % 3, at::ones(5));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(updater->meeting.most(), 1);
  double total = 0;
  for (const auto& value : store->pull({0, 1, 2})) {
    total += value[0].item<double>();
    EXPECT_TRUE(at::equal(value, value[0].expand(5)));
  }
  EXPECT_EQ(total, kThreads * kPushes);
}

} // namespace
} // namespace torchkv

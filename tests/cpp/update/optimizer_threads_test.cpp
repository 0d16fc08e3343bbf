// Threads that push, set the optimizer and read its state concurrently.
#include "update/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "optimizer_helpers.h"

namespace torchkv {
namespace {

using testing::expect_equal;
using testing::optimizer;
using testing::state_of;
using testing::value_of;

// Each push makes one step of each of its keys, whatever others do.
TEST(OptimizerThreadsTest, ConcurrentPushesSettingsAndStates) {
  constexpr int kThreads = 3;
  constexpr int kPushes = 200;
  constexpr int64_t kKeys = 20;
  const auto store = c10::make_intrusive<KVStore>();
  Keys keys;
  keys.single = false;
  for (int64_t key = 0; key < kKeys; ++key) {
    keys.list.emplace_back(key);
  }
  const auto repeat = [](const at::Tensor& tensor) {
    return Tensors::one_each(std::vector<at::Tensor>(kKeys, tensor));
  };
  store->init(keys, repeat(at::zeros(5)));
  const auto counting = [](double momentum) {
    return optimizer("sgd", {{"lr", 1}, {"weight_decay", momentum}});
  };
  store->set_optimizer(counting(0));
  std::vector<std::thread> threads;
  std::atomic<int> running{kThreads};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kPushes; ++i) {
        store->push(keys, repeat(at::full(5, -1.)));
      }
      --running;
    });
  }
  threads.emplace_back([&] {
    while (running > 0) {
      store->set_optimizer(counting(0), /*keep_state=*/true);
    }
  });
  int64_t last = 0;
  while (running > 0) {
    const auto states = store->optimizer_states(keys);
    EXPECT_GE(states[0].step, last);
    last = states[0].step;
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (int64_t key = 0; key < kKeys; ++key) {
    EXPECT_EQ(state_of(store, key).step, kThreads * kPushes);
    expect_equal(
        value_of(store, key), at::full(5, kThreads * kPushes, at::kFloat));
  }
}

} // namespace
} // namespace torchkv

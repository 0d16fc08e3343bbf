#include "dist/rendezvous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/errors.h"

namespace torchkv::dist {
namespace {

using std::chrono::milliseconds;

// Of this process; its calls take as long as is said.
class SlowRendezvous final : public Rendezvous {
 public:
  void set(const std::string& key, const std::string& value) override {
    wait();
    const std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  std::optional<std::string> get(const std::string& key, double /*timeout*/)
      override {
    wait();
    const std::lock_guard lock(mutex_);
    const auto it = values_.find(key);
    return it == values_.end() ? std::nullopt : std::optional(it->second);
  }
  int64_t add(const std::string& /*key*/, int64_t amount) override {
    wait();
    return amount;
  }
  std::string set_once(const std::string& /*key*/, const std::string& value)
      override {
    wait();
    return value;
  }

  std::atomic<int> wait_ms{0};

 private:
  void wait() const {
    std::this_thread::sleep_for(milliseconds(wait_ms));
  }

  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

int num_threads() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    if (word == "Threads:") {
      int count = 0;
      status >> count;
      return count;
    }
  }
  return -1;
}

TEST(BoundedRendezvous, FailsAtOnceWhileACallIsStuckAndRecovers) {
  const auto slow = std::make_shared<SlowRendezvous>();
  const auto rendezvous = bounded(slow, 0, 0.3);
  slow->wait_ms = 1500;
  EXPECT_THROW(rendezvous->set("a", "1"), StoreTimeoutError);
  slow->wait_ms = 0;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(rendezvous->set("b", "2"), StoreTimeoutError);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(150));
  std::this_thread::sleep_for(milliseconds(1500));
  // Of two threads, so that calls overlap.
  std::thread other([&] {
    for (int i = 0; i < 200; ++i) {
      rendezvous->set("c", "3");
    }
  });
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(rendezvous->get("b", 0), "2"); // the call was only late
  }
  other.join();
}

TEST(BoundedRendezvous, LeavesNoThreads) {
  const auto store = std::make_shared<SlowRendezvous>();
  const int before = num_threads();
  for (int i = 0; i < 300; ++i) {
    bounded(store, 0, 10)->set("a", "1");
  }
  EXPECT_EQ(num_threads(), before);
}

} // namespace
} // namespace torchkv::dist

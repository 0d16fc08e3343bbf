#pragma once

#include <c10/macros/Macros.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace torchkv::dist {

// Runs functions one after the other on a thread of its own. Thread-safe.
class Background {
 public:
  Background() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Background);
  // Runs what is queued first.
  ~Background() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  // REQUIRES: `function` does not throw.
  void run(std::function<void()> function) {
    {
      const std::lock_guard lock(mutex_);
      functions_.push_back(std::move(function));
      if (!thread_.joinable()) {
        thread_ = std::thread([this] { loop(); });
      }
    }
    wake_.notify_one();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopping_ || !functions_.empty(); });
      if (functions_.empty()) {
        return;
      }
      auto functions = std::exchange(functions_, {});
      lock.unlock();
      for (auto& function : functions) {
        function();
        function = nullptr; // what it holds is freed before the next
      }
      lock.lock();
    }
  }

  std::mutex mutex_; // guards the rest
  std::condition_variable wake_;
  std::vector<std::function<void()>> functions_;
  bool stopping_ = false;
  std::thread thread_; // started by the first function
};

} // namespace torchkv::dist

#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "../core/signals.h"
#include "protocol/action.h"

namespace torchkv::dist {

// A call of the worker that threads may wait for. Thread-safe.
class Pending {
 public:
  void finish(Return result) {
    {
      const std::lock_guard lock(mutex_);
      result_ = std::move(result);
    }
    finished_.notify_all();
  }

  bool is_finished() const {
    const std::lock_guard lock(mutex_);
    return result_.has_value();
  }

  // The result; it ends in time by itself. Throws what a signal handler raises.
  const Return& wait() {
    constexpr auto kSignals = std::chrono::milliseconds(200);
    std::unique_lock lock(mutex_);
    while (true) {
      finished_.wait_for(lock, kSignals, [this] { return !!result_; });
      if (result_) {
        return *result_; // not written again
      }
      lock.unlock();
      check_signals();
      lock.lock();
    }
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::optional<Return> result_;
};
using PendingPtr = std::shared_ptr<Pending>;

} // namespace torchkv::dist

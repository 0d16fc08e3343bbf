#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../core/signals.h"
#include "protocol/action.h"
#include "within.h"

namespace torchkv::dist {

// A call of the worker that threads may wait for. Thread-safe.
class Pending {
 public:
  using Clock = std::chrono::steady_clock;

  Pending() = default;
  // Of a call whose values are on a device: it times out by itself if it is not
  // begun() within so many seconds.
  explicit Pending(double timeout)
      : begins_until_(
            Clock::now() +
            std::chrono::duration_cast<Clock::duration>(
                std::chrono::duration<double>(std::min(timeout, 1e9)))) {}

  void begun() {
    const std::lock_guard lock(mutex_);
    begins_until_.reset();
  }

  // The first result counts.
  void finish(Return result) {
    std::vector<std::function<void()>> callbacks;
    {
      const std::lock_guard lock(mutex_);
      if (!result_) {
        result_ = std::move(result);
      }
      callbacks.swap(callbacks_);
    }
    finished_.notify_all();
    for (const auto& callback : callbacks) {
      callback();
    }
  }

  // Calls `callback` when there is a result: now, or in finish(), where it must
  // not block.
  void on_finish(std::function<void()> callback) {
    {
      const std::lock_guard lock(mutex_);
      if (!result_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

  bool is_finished() const {
    const std::lock_guard lock(mutex_);
    return result_.has_value();
  }

  // The result; it ends in time by itself. Throws what a signal handler raises.
  const Return& wait() {
    std::unique_lock lock(mutex_);
    while (true) {
      finished_.wait_for(lock, kSignalPeriod, [this] { return !!result_; });
      if (result_) {
        return *result_; // not written again
      }
      const bool is_late = begins_until_ && Clock::now() > *begins_until_;
      lock.unlock();
      if (is_late) {
        Return result;
        result.error = Error{
            ErrorCode::kTimeout,
            -1,
            {},
            "the values have not left their device",
            {}};
        finish(std::move(result));
      }
      check_signals();
      lock.lock();
    }
  }

 private:
  mutable std::mutex mutex_; // guards the rest
  std::condition_variable finished_;
  std::optional<Clock::time_point> begins_until_;
  std::optional<Return> result_;
  std::vector<std::function<void()>> callbacks_; // of finish()
};
using PendingPtr = std::shared_ptr<Pending>;

} // namespace torchkv::dist

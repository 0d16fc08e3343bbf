#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <mutex>
#include <utility>

#include "../core/signals.h"
#include "errors.h"

namespace torchkv::dist {

// Waits that end within a call's time-out, with StoreTimeoutError of `op`, and
// throw what a signal handler raises.

constexpr auto kSignalPeriod = std::chrono::milliseconds(200);

// Calls `wait(duration)` until it returns true; `what` is waited for.
template <class Wait>
void wait_within(
    const char* op,
    int64_t rank,
    double timeout,
    const char* what,
    Wait wait) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() +
      std::chrono::duration_cast<Clock::duration>(
                       std::chrono::duration<double>(std::min(timeout, 1e9)));
  while (!wait(
      std::min<Clock::duration>(
          kSignalPeriod,
          std::max<Clock::duration>(end - Clock::now(), Clock::duration(1))))) {
    check_signals();
    if (Clock::now() >= end) {
      Error error;
      error.code = ErrorCode::kTimeout;
      error.text = what;
      throw_error(op, error, rank, timeout);
    }
  }
}

template <class T>
T get_within(
    std::future<T>& future,
    const char* op,
    int64_t rank,
    double timeout,
    const char* what = "the server has not answered") {
  wait_within(op, rank, timeout, what, [&](auto duration) {
    return future.wait_for(duration) == std::future_status::ready;
  });
  return future.get();
}

inline std::unique_lock<std::timed_mutex> lock_within(
    std::timed_mutex& mutex,
    const char* op,
    int64_t rank,
    double timeout) {
  std::unique_lock lock(mutex, std::defer_lock);
  wait_within(
      op,
      rank,
      timeout,
      "a call of another thread has not ended",
      [&](auto duration) { return lock.try_lock_for(duration); });
  return lock;
}

} // namespace torchkv::dist

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "../../core/export.h"

namespace torchkv::dist {

// Waits for descriptors, each of which has a number.
class TORCHKV_API Poller {
 public:
  Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;
  ~Poller();

  // Any thread, also while another waits.
  void add(int fd, uint64_t number);
  // Before the descriptor is closed: a forked child may keep it open.
  void remove(int fd);

  // The numbers of readable descriptors: at most a bounded number of them.
  // Waits for one, or for wake(), at most `seconds`. One thread at a time.
  // Valid until the next call.
  const std::vector<uint64_t>& wait(double seconds);
  // Any thread.
  void wake();
  // An eventfd: who writes to it, in any process, wakes.
  int event() const {
    return event_;
  }

 private:
  int epoll_ = -1;
  int event_ = -1;
  std::atomic<bool> woken_{false}; // `event_` is readable, or about to be
  std::vector<uint64_t> numbers_;
};

} // namespace torchkv::dist

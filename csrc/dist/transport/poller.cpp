#include "poller.h"

#include <c10/util/Exception.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>

namespace torchkv::dist {
namespace {

constexpr uint64_t kEventNumber = UINT64_MAX;

void check_descriptor(bool succeeded, const char* what) {
  TORCH_CHECK(succeeded, what, " failed: ", std::strerror(errno));
}

} // namespace

Poller::Poller()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)),
      event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  check_descriptor(epoll_ >= 0, "epoll_create1");
  check_descriptor(event_ >= 0, "eventfd");
  add(event_, kEventNumber);
}

Poller::~Poller() {
  close(event_);
  close(epoll_);
}

void Poller::add(int fd, uint64_t number) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = number;
  check_descriptor(
      epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
}

void Poller::remove(int fd) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
}

const std::vector<uint64_t>& Poller::wait(double seconds) {
  numbers_.clear();
  std::array<epoll_event, 64> events{};
  const double ms = std::ceil(std::clamp(seconds, 0.0, 3600.0) * 1000);
  const int count = epoll_wait(
      epoll_,
      events.data(),
      static_cast<int>(events.size()),
      static_cast<int>(ms));
  for (int i = 0; i < count; ++i) { // none after EINTR
    const uint64_t number = events[static_cast<size_t>(i)].data.u64;
    if (number != kEventNumber) {
      numbers_.push_back(number);
      continue;
    }
    uint64_t counter = 0;
    static_cast<void>(read(event_, &counter, sizeof(counter)) == 0);
    // After the read: a wake() between the two is this one.
    woken_ = false;
  }
  return numbers_;
}

void Poller::wake() {
  if (!woken_.exchange(true)) {
    const uint64_t one = 1;
    static_cast<void>(write(event_, &one, sizeof(one)) == 0);
  }
}

} // namespace torchkv::dist

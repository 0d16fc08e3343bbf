#include "direct_transport.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <cstddef>
#include <utility>

#include "host.h"

namespace torchkv::dist {

DirectTransport::DirectTransport(int32_t rank)
    : rank_(rank), address_(own_process()), own_(rank) {}

void DirectTransport::connect(int32_t rank, const PeerAddress& /*address*/) {
  TORCH_CHECK(rank == rank_, "expected a job of one process");
}

void DirectTransport::disconnect(int32_t /*rank*/) {}

void DirectTransport::send(int32_t rank, Direction direction, Frame frame) {
  if (rank == rank_ && !frame.empty()) {
    own_.put(direction, std::move(frame));
  }
}

void DirectTransport::deliver(Handler& handler) {
  constexpr size_t kMaxFrames = 512;
  if (!delivering_) {
    delivering_ = true;
    const auto done = c10::make_scope_exit([&] { delivering_ = false; });
    own_.deliver(handler, kMaxFrames);
    if (!own_.empty()) {
      poller_.wake();
    }
  }
}

void DirectTransport::poll(
    std::unique_lock<std::mutex>& lock,
    Time timeout,
    Handler& handler) {
  if (own_.empty()) {
    lock.unlock();
    poller_.wait(timeout);
    lock.lock();
  } else {
    poller_.wait(0); // takes a wake()
  }
  deliver(handler);
}

void DirectTransport::wake() {
  poller_.wake();
}

void DirectTransport::close() {
  own_.clear();
}

} // namespace torchkv::dist

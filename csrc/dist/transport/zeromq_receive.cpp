#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "zeromq_transport.h"

namespace torchkv::dist {

namespace {

constexpr size_t kFramesAtOnce = 32; // of one socket, before the next one's
constexpr size_t kMaxFrames = 512; // of one deliver()
constexpr size_t kMaxParts = 8192; // of a message
constexpr Time kBrokenPeriod = 0.1; // of looking at a broken connection

Time monotonic_now() {
  return std::chrono::duration<Time>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

} // namespace

void ZeromqTransport::mark(uint64_t source) {
  if (known_ready_.insert(source).second) {
    ready_.push_back(source);
  }
  if (waiting_) {
    poller_.wake();
  }
}

void ZeromqTransport::deliver(Handler& handler) {
  if (!delivering_) {
    serve_all(handler);
  }
}

void ZeromqTransport::poll(
    std::unique_lock<std::mutex>& lock,
    Time timeout,
    Handler& handler) {
  const bool idle = ready_.empty() && own_.empty() &&
      (links_ == nullptr || links_->wait_for_bell());
  if (idle) {
    waiting_ = true;
    lock.unlock();
  }
  const Time wait =
      broken_.empty() ? timeout : std::min(timeout, kBrokenPeriod);
  const auto& sources = poller_.wait(idle ? wait : 0);
  if (idle) {
    lock.lock();
    waiting_ = false;
  }
  if (links_ != nullptr) {
    links_->stop_waiting();
  }
  for (const uint64_t source : sources) {
    mark(source);
  }
  for (const int32_t rank : broken_) {
    mark(number_of(Source::kState, rank));
  }
  serve_all(handler);
}

void ZeromqTransport::serve_all(Handler& handler) {
  delivering_ = true;
  const auto done = c10::make_scope_exit([&] { delivering_ = false; });
  size_t count = own_.deliver(handler, kMaxFrames);
  count += serve_links(handler);
  while (!ready_.empty() && count < kMaxFrames) {
    const uint64_t source = ready_.front();
    ready_.pop_front();
    known_ready_.erase(source);
    count += serve(source, handler);
    count += own_.deliver(handler, kMaxFrames);
  }
  if (waiting_ && !(ready_.empty() && own_.empty())) {
    poller_.wake();
  }
}

size_t ZeromqTransport::serve_links(Handler& handler) {
  size_t count = 0; // the rest of a deliver() is for the sockets
  while (links_ != nullptr && count < kMaxFrames / 2) {
    auto taken = links_->take();
    if (!taken) {
      break;
    }
    ++count;
    const auto [direction, parts] = std::move(taken->message);
    auto frame = decoded(parts, 0, direction);
    const int32_t rank =
        direction == Direction::kRequest ? taken->rank : config_.rank;
    if (frame && frame->front().header.rank == rank) {
      if (direction == Direction::kRequest) {
        links_->heard(rank, frame->front().header.inc);
      }
      handler.on_frame(taken->rank, direction, std::move(*frame));
    } else if (frame) {
      ++num_refused_;
    }
    count += own_.deliver(handler, kMaxFrames);
  }
  return count;
}

size_t ZeromqTransport::serve(uint64_t source, Handler& handler) {
  const auto rank = static_cast<int32_t>(source & UINT32_MAX);
  switch (static_cast<Source>(source >> 32U)) {
    case Source::kAuthenticator:
      authenticator_->answer();
      return 0;
    case Source::kMemory:
      links_->take_descriptors();
      return 0;
    case Source::kState:
      observe(rank, handler);
      return 1;
    default:
      break;
  }
  try {
    size_t count = 0;
    while (count < kFramesAtOnce && receive(source, rank, handler)) {
      ++count;
    }
    if (count == kFramesAtOnce) {
      mark(source); // after the others
    }
    return count;
  } catch (...) {
    mark(source); // its descriptor may tell nothing of what is left
    throw;
  }
}

bool ZeromqTransport::receive(uint64_t source, int32_t rank, Handler& handler) {
  zeromq::Parts parts;
  if (source == number_of(Source::kRouter)) {
    if (!router_->receive(parts, kMaxParts)) {
      return false;
    }
    // The first part is the identity of the connection.
    auto frame = decoded(parts, 1, Direction::kRequest);
    if (frame) {
      const Header& header = frame->front().header;
      const int32_t sender = header.rank;
      routes_.heard(
          sender, header.inc, zeromq::text_of(parts.front()), monotonic_now());
      handler.on_frame(sender, Direction::kRequest, std::move(*frame));
    }
    return true;
  }
  // The handler may have forgotten it.
  const auto peer = peers_.find(rank);
  if (peer == peers_.end() ||
      !peer->second.dealer().receive(parts, kMaxParts)) {
    return false;
  }
  auto frame = decoded(parts, 0, Direction::kAnswer);
  if (frame && frame->front().header.rank == config_.rank) {
    handler.on_frame(rank, Direction::kAnswer, std::move(*frame));
  } else if (frame) {
    ++num_refused_;
  }
  return true;
}

std::optional<Frame> ZeromqTransport::decoded(
    const std::vector<Blob>& parts,
    size_t first,
    Direction direction) {
  std::optional<Frame> frame;
  const bool has_names = links_ != nullptr && parts.size() > first &&
      MemoryLinks::is_names(parts[first]);
  const size_t head = first + (has_names ? 1 : 0);
  if (parts.size() > head && parts.size() <= kMaxParts) {
    std::vector<Blob> payloads(
        parts.begin() + static_cast<std::ptrdiff_t>(head) + 1, parts.end());
    if (!has_names || links_->resolve(parts[first], payloads)) {
      Limits limits = config_.limits;
      limits.lists = &lists_;
      frame = decode(parts[head], payloads, direction, config_.token, limits);
    }
  }
  num_refused_ += frame ? 0 : 1;
  return frame;
}

void ZeromqTransport::observe(int32_t rank, Handler& handler) {
  const auto found = peers_.find(rank);
  if (found == peers_.end()) {
    return;
  }
  Peer& peer = found->second;
  const bool lost = peer.observe(monotonic_now());
  if (peer.is_down()) {
    broken_.insert(rank);
  } else {
    broken_.erase(rank);
  }
  if (peer.has_ended()) {
    if (links_ != nullptr) {
      links_->ended(rank);
    }
    forget(found);
  }
  if (lost) {
    handler.on_peer_lost(rank);
  }
}

} // namespace torchkv::dist

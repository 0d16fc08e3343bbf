#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "transport.h"

namespace torchkv::dist {

// The frames of a process to itself.
class OwnFrames {
 public:
  explicit OwnFrames(int32_t rank) : rank_(rank) {}

  bool empty() const {
    return frames_.empty();
  }
  void put(Direction direction, Frame frame) {
    frames_.emplace_back(direction, std::move(frame));
  }
  // Hands over at most `limit` frames, and returns how many.
  size_t deliver(Transport::Handler& handler, size_t limit) {
    size_t count = 0;
    for (; !frames_.empty() && count < limit; ++count) {
      auto [direction, frame] = std::move(frames_.front());
      frames_.pop_front();
      handler.on_frame(rank_, direction, std::move(frame));
    }
    return count;
  }
  void clear() {
    frames_.clear();
  }

 private:
  const int32_t rank_;
  std::deque<std::pair<Direction, Frame>> frames_;
};

} // namespace torchkv::dist

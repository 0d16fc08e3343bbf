#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <queue>
#include <set>
#include <utility>
#include <vector>

#include "../../core/export.h"
#include "config.h"

namespace torchkv::dist {

// The pieces that wait for one peer: highest priority first, in frames of which
// at most Config::credit are in flight.
class TORCHKV_API PieceQueue {
 public:
  using Piece = std::pair<int64_t, int32_t>; // opno, index

  // Does nothing for a piece that waits or is in flight.
  void put(Piece piece, size_t bytes, int64_t priority);
  // The peer has the piece, or nobody needs it.
  void ack(Piece piece);
  struct Batch {
    int64_t frame = 0; // its number
    std::vector<Piece> pieces; // empty: none may be sent now
  };
  // The pieces of the next frame. A frame unheard of for Config::retry gives
  // its credit back.
  Batch pop(const Config& config, Time now);

 private:
  struct Waiting {
    int64_t priority;
    int64_t order;
    Piece piece;
    size_t bytes;
    bool operator<(const Waiting& other) const {
      return priority != other.priority ? priority < other.priority
                                        : order > other.order;
    }
  };
  struct InFlight {
    Time sent;
    std::set<Piece> pieces; // not acknowledged
  };
  std::priority_queue<Waiting> heap_;
  std::set<Piece> waiting_;
  std::map<Piece, int64_t> flying_; // its frame
  std::map<int64_t, InFlight> frames_;
  int64_t count_ = 0;
};

} // namespace torchkv::dist

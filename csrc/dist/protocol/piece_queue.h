#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <queue>
#include <utility>
#include <vector>

#include "../../core/export.h"
#include "../../core/mixed_bits.h"
#include "config.h"

namespace torchkv::dist {

// The pieces that wait for one peer: highest priority first, in frames of which
// at most Config::credit are in flight.
class TORCHKV_API PieceQueue {
 public:
  using Piece = std::pair<int64_t, int32_t>; // opno, index

  // Does nothing for a piece that waits or is in flight.
  void put(Piece piece, size_t bytes, int64_t priority);
  // Whether it waits or is in flight.
  bool contains(Piece piece) const {
    return pieces_.find(piece) != pieces_.end();
  }
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
    Time sent = 0;
    std::vector<Piece> pieces;
    size_t num_left = 0; // not acknowledged
  };
  struct Hash {
    size_t operator()(const Piece& piece) const {
      return mixed_bits(
          mixed_bits(static_cast<uint64_t>(piece.first)) +
          static_cast<uint64_t>(piece.second));
    }
  };
  // The number of a piece's frame; of one that waits:
  static constexpr int64_t kWaits = 0;

  std::priority_queue<Waiting> heap_;
  ska::flat_hash_map<Piece, int64_t, Hash> pieces_;
  std::map<int64_t, InFlight> frames_;
  int64_t count_ = 0;
};

} // namespace torchkv::dist

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace torchkv::dist {

// Seconds of a monotonic clock.
using Time = double;

// When the pushes of a slice make a round.
struct Policy {
  std::optional<int32_t> quorum; // none: all ranks (dist_sync); 1: dist_async
  // How many pushes a rank may be ahead of the slowest; none: any number.
  std::optional<int64_t> staleness;
  Time grace = 0; // to wait for more ranks after the quorum
  Time patience = 1; // below the quorum

  bool is_sync() const {
    return !quorum;
  }
};

// Equal on all cores of a store, but for what `digest` says.
struct Config {
  int64_t job = 0; // number of this start of the job
  uint64_t store = 0; // identifies the store within the job
  int32_t num_workers = 1;
  int32_t num_servers = 1;
  Policy policy;
  uint64_t digest = 0; // of all that ranks must agree on to share a store
  bool push_regions = false; // pushes name a region of shared memory
  bool leases = false; // pulls are answered by a region of shared memory

  Time heartbeat = 1; // period
  Time lost = 4; // silence after which a peer is lost
  Time join = 300; // silence of a rank that has not said hello yet
  Time retry = 1; // an operation without an answer is asked for again

  size_t piece_bytes = size_t{1} << 20U;
  size_t frame_bytes = size_t{1} << 20U; // of the pieces that share a frame
  size_t frame_pieces = 4096;
  size_t credit = 2; // frames with pieces in flight to one peer
  int64_t split_bytes = int64_t{64} * 1024;
  int32_t regions = 2; // for the pushes of one slice of one worker
};

} // namespace torchkv::dist

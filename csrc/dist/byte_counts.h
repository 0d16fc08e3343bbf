#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "../core/export.h"

namespace torchkv::dist {

// How many bytes of values this process has copied or handed over, for all its
// stores of several processes. Thread-safe.
struct ByteCounts {
  using Count = std::atomic<int64_t>;

  Count summed{0}; // of pushes: the sums, and copies, in buffers
  Count listed{0}; // of these, small values that travel together
  Count named{0}; // that other ranks read in shared memory
  Count sent{0}; // in messages through sockets, without the named ones
  Count joined{0}; // pieces that were copied into one tensor
  // Memory of sums and of values on the servers, but for those that travel
  // together: the first, and where the last is still in use.
  Count allocated{0};
  Count written{0}; // outs
  Count in_pass{0}; // of these, by the pass that made the values
};

TORCHKV_API ByteCounts& byte_counts();
// By name.
TORCHKV_API std::map<std::string, int64_t> snapshot_of_byte_counts();

} // namespace torchkv::dist

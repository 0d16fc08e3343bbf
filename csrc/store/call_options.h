#pragma once

#include <cstdint>

namespace torchkv {

// Options of push, pull, pushpull and broadcast.
struct CallOptions {
  // A larger priority goes first among operations that wait; in a store on one
  // machine none waits.
  int64_t priority = 0;
  // Returns when the arguments are checked and the work is enqueued, with a
  // Work (device/work.h).
  bool async_op = false;
};

} // namespace torchkv

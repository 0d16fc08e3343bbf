#pragma once

#include <cstdint>

namespace torchkv {

// Options of push, pull, pushpull and broadcast.
struct CallOptions {
  // Larger priorities go first among queued operations; a store on one machine
  // queues none.
  int64_t priority = 0;
  // Return a Work (device/work.h) once arguments are checked and work is
  // enqueued.
  bool async_op = false;
};

} // namespace torchkv

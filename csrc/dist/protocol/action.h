#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "config.h"
#include "message.h"
#include "round.h"

namespace torchkv::dist {

// What a core asks its driver to do, in this order.

using CallId = int64_t;

struct Address {
  enum class Role : uint8_t { kServer, kWorker };
  Role role;
  int32_t number;

  friend bool operator==(const Address& a, const Address& b) {
    return a.role == b.role && a.number == b.number;
  }
};

// May be lost, delayed, repeated and reordered.
struct Send {
  Address to;
  Frame frame;
};
// Call on_timer at this time, or earlier.
struct Wake {
  Time at;
};
// Write a file, atomically, then call on_written().
struct WriteShard {
  Shard shard;
};
struct WriteManifest {
  Manifest manifest;
};
// Set round->partial, then call on_measured(round).
struct Measure {
  RoundPtr round;
};
// Set round->result, then call on_applied(round, error).
struct Apply {
  RoundPtr round;
};
// With leases only, once for each incarnation of a slice: give both slots their
// region, before the next event. slots[0] holds the pieces of the slice's first
// value, which are to be copied there; slots[1] is empty. The two stay the
// slice's slots until Erase.
struct MakeSlots {
  SliceId slice;
  int64_t kid;
  std::array<ValuePtr, 2> slots;
};
// The slice's incarnation is deleted: no round of it will begin.
struct Erase {
  SliceId slice;
  int64_t kid;
};
// Copy a push into its region, before any of the actions that follow.
struct CopyIn {
  Region region;
  Blob bytes;
};
// Copy the lease out, then call on_copied(opno, bytes, the region's stamp).
struct CopyOut {
  int64_t opno;
  Region region;
};

// What a call has brought for one slice.
struct SliceResult {
  // is_server(): of `server` itself. is_list(): of all slices of the list;
  // `pieces` is one blob of their values.
  SliceId slice;
  int32_t server = 0;
  Blobs pieces; // of a pull
  int64_t version = 0;
  int64_t kid = 0;
  int64_t round = 0;
  int64_t age = 0;
  Rare<Error> error;
  std::vector<SliceResult> parts; // private to Worker
};
// A worker's call has ended.
struct Return {
  CallId call;
  Rare<Error> error;
  std::vector<SliceResult> results; // without an error
  bool begun = false; // has sent an operation
};

using Action = std::variant<
    Send,
    Wake,
    WriteShard,
    WriteManifest,
    Measure,
    Apply,
    Erase,
    CopyIn,
    CopyOut,
    Return,
    MakeSlots>;
using Actions = std::vector<Action>;

} // namespace torchkv::dist

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core.h"

namespace torchkv::dist {

// A call of a worker. Calls on several keys are refused as a whole.
struct Request {
  enum class Kind : uint8_t {
    kInit,
    kPush,
    kPushPull,
    kPull,
    kDelete,
    kConfig, // rank 0 only
    kBarrier,
    kSnapshot, // rank 0 only
    kClose,
  };
  struct Item {
    Key key = 0;
    KeySpec spec; // kInit
    // The whole key, contiguous: kPush, kPushPull, rank 0's kInit. Not written
    // until nothing refers to it any more.
    Blob value;
    int64_t priority = 0;
    int64_t min_version = 0; // kPull
  };
  Kind kind;
  std::vector<Item> items; // distinct keys
  bool two_phase = false; // kPush, kPushPull: clip by the norm of all items
  Blob options; // kConfig
  int64_t step = 0; // kSnapshot
};

// One worker of a store: it sends a rank's calls to the servers until they are
// answered. docs/protocol.md documents the rules.
class TORCHKV_API Worker final : public Core {
 public:
  // `inc` counts the processes that have had this rank in this job.
  Worker(int32_t rank, int64_t inc, const Config& config, Time now);
  ~Worker();

  // Whether calls may begin: all servers have been heard of, or lost.
  bool ready() const;
  // Begins a call, which ends by the action Return, at the latest `timeout`
  // seconds from now. REQUIRES: ready().
  CallId call(Request request, Time now, Time timeout);
  // A call that waits for memory, behind which no call may begin, or 0.
  CallId stalled() const;

  // Events, as those of Server.
  void on_message(const Frame& frame, Time now);
  void on_timer(Time now);
  void on_peer_lost(int32_t server, Time now);
  void on_written(int64_t snapshot, Time now); // the manifest
  // `bytes` is a copy of the lease, `kid` and `version` the stamp of its region
  // after the copy.
  void on_copied(
      int64_t opno,
      const Blob& bytes,
      int64_t kid,
      int64_t version,
      Time now);
};

} // namespace torchkv::dist

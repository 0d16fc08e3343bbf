#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_set>

#include "../core/export.h"
#include "../store/arguments.h"
#include "../store/options.h"
#include "pending.h"

namespace torchkv::dist {

// When rank 0 takes snapshots: between two steps of its program. A step begins
// with the push of a key that the current one has pushed already, and has ended
// when all keys of the step before have been pushed: keys may come, go, and be
// pushed in some steps only. Of the first step nothing is known, so it may have
// ended after each of its pushes. Thread-safe.
class TORCHKV_API SnapshotSchedule {
 public:
  explicit SnapshotSchedule(const StoreOptions& options);

  // After a push of these keys, where a repeated one counts once: the number of
  // steps, if a snapshot is due.
  std::optional<int64_t> due(const Keys& pushed);
  // The next one waits for it.
  void begun(PendingPtr snapshot);

 private:
  const int64_t rounds_; // 0: never
  const Time seconds_; // 0: never

  std::mutex mutex_; // guards the rest
  using KeySet = std::unordered_set<Key, KeyHash>;
  KeySet pushed_; // in this step
  KeySet before_; // in the step before
  size_t num_missing_ = 0; // keys of before_ that are not in pushed_
  int64_t num_steps_ = 0;
  int64_t last_step_ = 0; // with a snapshot
  Time last_time_;
  PendingPtr pending_;
};

} // namespace torchkv::dist

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
// with the push of a key that the current one has pushed already. It has ended
// before that if all keys that were ever pushed were pushed in it; keys that
// appear later are not known yet, as in the first step. Thread-safe.
class TORCHKV_API SnapshotSchedule {
 public:
  explicit SnapshotSchedule(const StoreOptions& options);

  // The number of steps, if a snapshot is due before, or after, the push of
  // these keys, where a repeated one counts once. Both are called for each
  // push.
  std::optional<int64_t> due_before(const Keys& keys);
  std::optional<int64_t> due_after(const Keys& keys);
  // The next one waits for it.
  void begun(PendingPtr snapshot);

 private:
  // With the mutex held.
  bool begins_step(const Keys& keys) const;
  std::optional<int64_t> due();

  const int64_t rounds_; // 0: never
  const Time seconds_; // 0: never

  std::mutex mutex_; // guards the rest
  using KeySet = std::unordered_set<Key, KeyHash>;
  KeySet pushed_; // in this step
  KeySet known_; // pushed in any step
  int64_t num_steps_ = 0;
  int64_t last_step_ = 0; // with a snapshot
  Time last_time_;
  PendingPtr pending_;
};

} // namespace torchkv::dist

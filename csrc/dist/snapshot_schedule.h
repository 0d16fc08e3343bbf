#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "../store/arguments.h"
#include "../store/options.h"
#include "pending.h"

namespace torchkv::dist {

// When rank 0 takes snapshots: between two steps of its program, after which
// all keys that it pushes have been pushed equally often. Thread-safe.
class SnapshotSchedule {
 public:
  explicit SnapshotSchedule(const StoreOptions& options);

  // After a push of these keys: the number of steps, if a snapshot is due.
  std::optional<int64_t> due(const Keys& pushed);
  // The next one waits for it.
  void begun(PendingPtr snapshot);

 private:
  const int64_t rounds_; // 0: never
  const Time seconds_; // 0: never

  std::mutex mutex_; // guards the rest
  std::unordered_map<Key, int64_t, KeyHash> counts_;
  int64_t most_ = 0; // of the counts
  size_t num_most_ = 0; // keys with so many
  int64_t last_step_ = 0;
  Time last_time_;
  PendingPtr pending_;
};

} // namespace torchkv::dist

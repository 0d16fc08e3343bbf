#include "snapshot_schedule.h"

#include <algorithm>
#include <utility>

#include "node.h"

namespace torchkv::dist {

SnapshotSchedule::SnapshotSchedule(const StoreOptions& options)
    : rounds_(options.snapshot_rounds),
      seconds_(options.snapshot_seconds),
      last_time_(Node::now()) {}

bool SnapshotSchedule::begins_step(const Keys& keys) const {
  return std::any_of(
      keys.list.begin(), keys.list.end(), [this](const Key& key) {
        return pushed_.count(key) != 0;
      });
}

std::optional<int64_t> SnapshotSchedule::due() {
  const bool is_due = (rounds_ != 0 && num_steps_ - last_step_ >= rounds_) ||
      (seconds_ != 0 && Node::now() - last_time_ >= seconds_);
  if (!is_due || (pending_ != nullptr && !pending_->is_finished())) {
    return std::nullopt;
  }
  last_step_ = num_steps_;
  last_time_ = Node::now();
  return num_steps_;
}

// Where a step lacks a key, only this finds its end.
std::optional<int64_t> SnapshotSchedule::due_before(const Keys& keys) {
  if (rounds_ == 0 && seconds_ == 0) {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  return begins_step(keys) ? due() : std::nullopt;
}

std::optional<int64_t> SnapshotSchedule::due_after(const Keys& keys) {
  if (rounds_ == 0 && seconds_ == 0) {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  if (num_steps_ == 0 || begins_step(keys)) {
    ++num_steps_;
    pushed_.clear();
  }
  pushed_.insert(keys.list.begin(), keys.list.end());
  known_.insert(keys.list.begin(), keys.list.end());
  return pushed_.size() == known_.size() ? due() : std::nullopt;
}

void SnapshotSchedule::begun(PendingPtr snapshot) {
  const std::lock_guard lock(mutex_);
  pending_ = std::move(snapshot);
}

} // namespace torchkv::dist

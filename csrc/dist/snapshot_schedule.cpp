#include "snapshot_schedule.h"

#include <utility>

#include "node.h"

namespace torchkv::dist {

SnapshotSchedule::SnapshotSchedule(const StoreOptions& options)
    : rounds_(options.snapshot_rounds),
      seconds_(options.snapshot_seconds),
      last_time_(Node::now()) {}

std::optional<int64_t> SnapshotSchedule::due(const Keys& pushed) {
  if (rounds_ == 0 && seconds_ == 0) {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  for (const auto& key : pushed.list) {
    const int64_t count = ++counts_[key];
    if (count > most_) {
      most_ = count;
      num_most_ = 0;
    }
    num_most_ += count == most_ ? 1 : 0;
  }
  const bool is_due = (rounds_ != 0 && most_ - last_step_ >= rounds_) ||
      (seconds_ != 0 && Node::now() - last_time_ >= seconds_);
  if (!is_due || num_most_ != counts_.size() ||
      (pending_ != nullptr && !pending_->is_finished())) {
    return std::nullopt;
  }
  last_step_ = most_;
  last_time_ = Node::now();
  return most_;
}

void SnapshotSchedule::begun(PendingPtr snapshot) {
  const std::lock_guard lock(mutex_);
  pending_ = std::move(snapshot);
}

} // namespace torchkv::dist

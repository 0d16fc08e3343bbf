#include "snapshot_schedule.h"

#include <algorithm>
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
  const bool begins_step = num_steps_ == 0 ||
      std::any_of(pushed.list.begin(), pushed.list.end(), [&](const Key& key) {
                             return pushed_.count(key) != 0;
                           });
  if (begins_step) {
    ++num_steps_;
    before_ = std::exchange(pushed_, {});
    num_missing_ = before_.size();
  }
  for (const auto& key : pushed.list) {
    if (pushed_.insert(key).second) {
      num_missing_ -= before_.count(key);
    }
  }
  const bool is_due = (rounds_ != 0 && num_steps_ - last_step_ >= rounds_) ||
      (seconds_ != 0 && Node::now() - last_time_ >= seconds_);
  if (!is_due || num_missing_ != 0 ||
      (pending_ != nullptr && !pending_->is_finished())) {
    return std::nullopt;
  }
  last_step_ = num_steps_;
  last_time_ = Node::now();
  return num_steps_;
}

void SnapshotSchedule::begun(PendingPtr snapshot) {
  const std::lock_guard lock(mutex_);
  pending_ = std::move(snapshot);
}

} // namespace torchkv::dist

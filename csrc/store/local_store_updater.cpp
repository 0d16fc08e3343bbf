// LocalStore's updater or optimizer.
#include <algorithm>
#include <utility>

#include "check.h"
#include "local_store.h"

namespace torchkv {

Updater LocalStore::updater() const {
  const std::lock_guard lock(updater_mutex_);
  return updater_;
}

OptimizerPtr LocalStore::current_optimizer() const {
  const Updater updater = this->updater();
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  return optimizer == nullptr ? nullptr : *optimizer;
}

OptimizerPtr LocalStore::optimizer(const char* op) const {
  table_.check_open(op);
  OptimizerPtr optimizer = current_optimizer();
  TORCH_CHECK_VALUE(
      optimizer != nullptr,
      op,
      ": the store has no optimizer; call set_optimizer first");
  return optimizer;
}

void LocalStore::set_updater(std::shared_ptr<OpaqueUpdater> updater) {
  Updater next;
  if (updater != nullptr) {
    next = std::move(updater);
  }
  replace_updater("set_updater", std::move(next), new_generation());
}

uint64_t LocalStore::set_optimizer(
    Optimizer optimizer,
    bool keep_state,
    bool check_keys) {
  constexpr auto* op = "set_optimizer";
  check_optimizer(op, optimizer);
  std::vector<Key> unknown;
  if (check_keys) {
    const OptimizerPtr known = keep_state ? current_optimizer() : nullptr;
    unknown = unknown_option_keys(op, table_, optimizer, known.get());
  }
  if (!keep_state) {
    optimizer.generation = new_generation();
    const uint64_t generation = optimizer.generation;
    replace_updater(
        op,
        std::make_shared<const Optimizer>(std::move(optimizer)),
        generation,
        std::move(unknown));
    return generation;
  }
  OptimizerPtr next; // the old one is freed after the lock is released
  const std::lock_guard lock(updater_mutex_);
  table_.check_open(op);
  auto* current = std::get_if<OptimizerPtr>(&updater_);
  TORCH_CHECK_VALUE(
      current != nullptr && (*current)->groups[0].id == optimizer.groups[0].id,
      op,
      ": expected the optimizer that is set, with other numbers, but got '",
      optimizer.name(),
      "' where ",
      current == nullptr ? "no optimizer is set"
                         : c10::str('\'', (*current)->name(), "' is"));
  optimizer.generation = (*current)->generation;
  next = std::make_shared<const Optimizer>(std::move(optimizer));
  current->swap(next);
  unknown.insert(unknown.begin(), expected_keys_.begin(), expected_keys_.end());
  set_expected_keys(std::move(unknown));
  return (*current)->generation;
}

void LocalStore::expect_keys(const Keys& keys) {
  table_.check_open("expect_keys");
  const std::lock_guard lock(updater_mutex_);
  set_expected_keys({keys.list.begin(), keys.list.end()});
}

void LocalStore::set_expected_keys(std::vector<Key> keys) {
  expects_keys_ = !keys.empty() || !compression_keys_.empty();
  expected_keys_ = std::move(keys);
}

void LocalStore::check_expected_keys(const char* op) {
  if (!expects_keys_) {
    return;
  }
  const std::lock_guard lock(updater_mutex_);
  check_known(op, table_, expected_keys_);
  check_known(op, table_, compression_keys_);
  compression_keys_.clear();
  set_expected_keys({});
}

void LocalStore::replace_updater(
    const char* op,
    Updater next,
    uint64_t generation,
    std::vector<Key> expected) {
  std::vector<EntryPtr> entries;
  {
    const std::lock_guard lock(updater_mutex_);
    entries = table_.entries(op);
    if (const auto kind = table_.summary().kind) {
      check_key_kind(op, next, *kind);
    }
    may_shard_ = is_elementwise(next);
    updater_.swap(next); // the old one is freed after the lock is released
    set_expected_keys(std::move(expected));
    optimizer_step_.clear_norm();
  }
  // A key that a call holds keeps its state until its next push: that call may
  // wait for this thread.
  for (const auto& entry : entries) {
    const std::unique_lock lock(entry->mutex, std::try_to_lock);
    if (lock.owns_lock() && entry->generation != 0 &&
        entry->generation < generation) {
      slices_.clear_state(*entry);
      entry->generation = 0;
    }
  }
}

void LocalStore::visit_sole_updater(
    c10::function_ref<void(const OpaqueUpdater&)> visit) const {
  const std::lock_guard lock(updater_mutex_);
  const auto* opaque = std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater_);
  if (opaque != nullptr && opaque->use_count() == 1) {
    visit(**opaque);
  }
}

void LocalStore::set_offset(const Key& key, int64_t offset) {
  const EntryPtr entry = table_.find("init", key)[0];
  const std::lock_guard lock(entry->mutex);
  entry->offset = offset;
}

} // namespace torchkv

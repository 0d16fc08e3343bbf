// LocalStore's updater or optimizer, with its state; and what a LocalStore
// hands out to be saved, and takes back.
#include <algorithm>
#include <utility>

#include "../core/errors.h"
#include "../core/in_progress.h"
#include "../memory/layout.h"
#include "../update/script_updater.h"
#include "check.h"
#include "local_store.h"
#include "shared_values.h"

namespace torchkv {
namespace {

// Whether a value, whole as that of `next`, lies as that one does, so that what
// an optimizer keeps for it may stay. REQUIRES: the entry's mutex.
bool keeps_place(const Entry& entry, const Entry& next) {
  return entry.slices.size() == 1 &&
      entry.slices[0].home == next.slices[0].home &&
      same_layout(entry.meta.sizes, entry.strides, next.strides);
}

} // namespace

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

StoreState LocalStore::state(bool with_keys) const {
  constexpr auto* op = "save";
  const Updater updater = this->updater();
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  StoreState state;
  if (const CompressionPtr compression = this->compression()) {
    state.compression = compression->get();
  }
  const auto entries = with_keys ? table_.entries(op) : std::vector<EntryPtr>();
  table_.check_open(op);
  if (const auto kind = table_.summary().kind) {
    state.key_kind = name(*kind);
  }
  for (const auto& entry : entries) {
    if (entry->key.kind() == KeyKind::kInt) {
      state.int_keys.push_back(entry->key.id());
    } else {
      state.str_keys.push_back(entry->key.text());
    }
    if (has_shared_) {
      check_shared({op, Keys(entry->key)}, {entry});
    }
    // Value, version and state of one moment.
    const std::lock_guard lock(entry->mutex);
    state.values.push_back(
        slices_.empty_like(*entry, entry->meta.dtype, entry->device));
    reducer_.copy_out(Item{entry.get(), {}, state.values.back(), nullptr});
    state.versions.push_back(entry->version);
    if (optimizer != nullptr) {
      state.states.push_back(state_of(*entry, **optimizer));
    }
    save_residuals(*entry, state);
  }
  if (optimizer != nullptr) {
    state.optimizer = **optimizer;
  }
  if (const auto* opaque =
          std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater)) {
    const InProgress<Store> saving(this);
    state.updater.push_back(serialize_updater(**opaque));
  }
  return state;
}

// REQUIRES: the entry's mutex.
KeyState LocalStore::state_of(Entry& entry, const Optimizer& optimizer) const {
  return entry.generation == optimizer.generation
      ? slices_.state_of(entry, optimizer.rule_of(entry.key))
      : KeyState();
}

KeyState LocalStore::state_of(const Key& key, const Updater& updater) const {
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  const EntryPtr entry = table_.find("save", key)[0];
  const std::lock_guard lock(entry->mutex);
  return optimizer == nullptr ? KeyState() : state_of(*entry, **optimizer);
}

void LocalStore::set_state_of(
    const Key& key,
    const Updater& updater,
    const KeyState& state) {
  constexpr auto* op = "load";
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  if (optimizer == nullptr) {
    return;
  }
  const RuleSpec rule = (*optimizer)->rule_of(key);
  const EntryPtr entry = table_.find(op, key)[0];
  check_state(op, *entry, rule, state);
  const std::lock_guard lock(entry->mutex);
  slices_.set_state(*entry, rule, state);
  entry->generation = (*optimizer)->generation;
}

void LocalStore::share(const Call& call, const Entries& entries) {
  for (size_t i = 0; i < entries.size(); ++i) {
    const at::Tensor& value = call.values->flat[i];
    const Where where{call.op, entries[i]->key};
    TORCHKV_CHECK_TYPE(
        value.scalar_type() == entries[i]->meta.dtype,
        where,
        "expected a tensor of dtype ",
        entries[i]->meta.dtype,
        " to share, but got ",
        value.scalar_type());
  }
  check_shareable(call, table_.entries(call.op), only_cpu_);
  has_shared_ = true;
  const OptimizerPtr optimizer = current_optimizer();
  // All copies first: running out of memory changes nothing.
  Entries shared;
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    Entry& next =
        *shared.emplace_back(c10::make_intrusive<Entry>(entry.key, entry.meta));
    placement_.store(next, call.values->flat[i], /*share=*/true);
    const std::lock_guard lock(entry.mutex);
    for (const auto& residual : entry.residuals) {
      next.residuals.push_back(slices_.laid_out_as(next, residual));
    }
    if (optimizer != nullptr && entry.generation == optimizer->generation &&
        !keeps_place(entry, next)) {
      const RuleSpec rule = optimizer->rule_of(entry.key);
      slices_.set_state(next, rule, slices_.state_of(entry, rule));
    }
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    Entry& next = *shared[i];
    const std::lock_guard lock(entry.mutex);
    if (entry.is_shared &&
        entry.slices[0].value.const_data_ptr() ==
            next.slices[0].value.const_data_ptr() &&
        keeps_place(entry, next)) {
      continue; // this very tensor
    }
    if (keeps_place(entry, next)) {
      // Where the master does not round to the value, the next step replaces
      // it.
      entry.slices[0].value = next.slices[0].value;
      entry.slices[0].is_leased = false;
    } else {
      entry.residuals = std::move(next.residuals);
      entry.slices = std::move(next.slices);
      entry.strides = next.strides;
      entry.device = next.device;
      entry.placing = next.placing;
    }
    entry.is_shared = true;
    ++entry.version;
  }
}

std::vector<KeyState> LocalStore::optimizer_states(const Keys& keys) {
  constexpr auto* op = "optimizer_states";
  const OptimizerPtr optimizer = this->optimizer(op);
  std::vector<KeyState> states;
  for (const auto& entry : table_.find(op, keys)) {
    const std::lock_guard lock(entry->mutex);
    states.push_back(state_of(*entry, *optimizer));
  }
  return states;
}

void LocalStore::set_optimizer_states(
    const Keys& keys,
    const std::vector<KeyState>& states) {
  constexpr auto* op = "set_optimizer_states";
  const OptimizerPtr optimizer = this->optimizer(op);
  const Entries entries = table_.find(op, keys);
  TORCH_CHECK_VALUE(
      states.size() == entries.size(),
      op,
      ": expected ",
      entries.size(),
      " states, one for each key, but got ",
      states.size(),
      " ",
      keys.context());
  for (size_t i = 0; i < states.size(); ++i) {
    check_state(
        op, *entries[i], optimizer->rule_of(entries[i]->key), states[i]);
  }
  for (size_t i = 0; i < states.size(); ++i) {
    Entry& entry = *entries[i];
    const std::lock_guard lock(entry.mutex);
    slices_.set_state(entry, optimizer->rule_of(entry.key), states[i]);
    entry.generation = optimizer->generation;
  }
}

void LocalStore::load(StoreState state) {
  Keys keys;
  keys.list.append(state.int_keys.begin(), state.int_keys.end());
  keys.list.append(state.str_keys.begin(), state.str_keys.end());
  for (size_t i = 0; i < keys.list.size(); ++i) {
    // One by one, so that a value is freed before the next is copied.
    const Key& key = keys.list[i];
    check_counter({"load", key}, "version", state.versions[i]);
    const Tensors value(std::exchange(state.values[i], at::Tensor()));
    insert({"init", key, &value});
    table_.find("load", key)[0]->version = state.versions[i];
  }
  if (const auto kind = state.kind()) {
    table_.fix_kind(*kind);
  }
  load_compression(state, keys);
  if (!state.updater.empty()) {
    set_updater(ScriptUpdater::load(state.updater[0]));
  }
  if (state.optimizer) {
    // A key that was deleted may have options. In a store without keys they
    // are for keys to come.
    set_optimizer(
        *std::move(state.optimizer),
        /*keep_state=*/false,
        /*check_keys=*/keys.size() == 0);
    if (keys.size() != 0) {
      keys.single = false;
      set_optimizer_states(keys, state.states);
    }
  }
}

void LocalStore::take(Store& other_store) {
  constexpr auto* op = "load";
  TORCHKV_INTERNAL_ASSERT(this != &other_store);
  auto& other = dynamic_cast<LocalStore&>(other_store);
  for (const auto& entry : other.table_.entries(op)) {
    const std::lock_guard lock(entry->mutex);
    placement_.adopt(*entry);
  }
  // Both are freed after the lock is released, as in close().
  Updater updater = other.updater();
  StoreStatus taken = other.status();
  std::vector<EntryPtr> replaced;
  {
    const std::lock_guard lock(updater_mutex_);
    if (const auto kind = table_.summary().kind) {
      check_key_kind(op, updater, *kind);
    }
    replaced = table_.take(op, other.table_);
    may_shard_ = is_elementwise(updater);
    updater_.swap(updater);
    compression_keys_.clear();
    set_expected_keys(std::move(taken.expected_keys));
    compression_ = other.compression();
    compresses_ = compression_ != nullptr;
    optimizer_step_.take(other.optimizer_step_);
  }
  other.close();
}

} // namespace torchkv

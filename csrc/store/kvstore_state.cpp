// What a store hands out to be saved, and takes back.
#include <utility>

#include "../core/errors.h"
#include "../core/in_progress.h"
#include "../kvstore.h"
#include "check.h"

namespace torchkv {

StoreState KVStore::state(bool with_keys) const {
  constexpr auto* op = "save";
  check_usable(op);
  const Updater updater = this->updater();
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  StoreState state;
  state.type = type();
  const auto entries = with_keys ? table_.entries(op) : std::vector<EntryPtr>();
  table_.check_open(op);
  if (const auto kind = table_.kind()) {
    state.key_kind = name(*kind);
  }
  for (const auto& entry : entries) {
    if (entry->key.kind() == KeyKind::kInt) {
      state.int_keys.push_back(entry->key.id());
    } else {
      state.str_keys.push_back(entry->key.text());
    }
    // Value and version of one moment.
    const std::lock_guard lock(entry->mutex);
    state.values.push_back(comm_->empty_like(*entry));
    comm_->copy_out(Item{entry.get(), {}, state.values.back(), nullptr});
    state.versions.push_back(entry->version);
    if (optimizer != nullptr) {
      state.states.push_back(state_of(*entry, **optimizer));
    }
  }
  if (optimizer != nullptr) {
    state.optimizer = **optimizer;
  }
  if (const auto* opaque =
          std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater)) {
    const InProgress<KVStore> saving(this);
    state.updater.push_back(serialize_updater(**opaque));
  }
  return state;
}

// REQUIRES: the entry's mutex.
KeyState KVStore::state_of(Entry& entry, const Optimizer& optimizer) const {
  return entry.optimizer == optimizer.identity
      ? comm_->state_of(entry, optimizer.rule_of(entry.key))
      : KeyState();
}

OptimizerPtr KVStore::optimizer(const char* op) const {
  table_.check_open(op);
  const Updater updater = this->updater();
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  TORCH_CHECK_VALUE(
      optimizer != nullptr,
      op,
      ": expected a store with an optimizer, but got one without");
  return *optimizer;
}

std::vector<KeyState> KVStore::optimizer_states(const Keys& keys) const {
  constexpr auto* op = "optimizer_states";
  check_usable(op);
  const OptimizerPtr optimizer = this->optimizer(op);
  std::vector<KeyState> states;
  for (const auto& entry : table_.find(op, keys)) {
    const std::lock_guard lock(entry->mutex);
    states.push_back(state_of(*entry, *optimizer));
  }
  return states;
}

void KVStore::set_optimizer_states(
    const Keys& keys,
    const std::vector<KeyState>& states) {
  constexpr auto* op = "set_optimizer_states";
  check_usable(op);
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
    const Entry& entry = *entries[i];
    check_state(
        op, entry.key, entry.meta, optimizer->rule_of(entry.key), states[i]);
  }
  for (size_t i = 0; i < states.size(); ++i) {
    Entry& entry = *entries[i];
    const std::lock_guard lock(entry.mutex);
    comm_->set_state(entry, optimizer->rule_of(entry.key), states[i]);
    entry.optimizer = optimizer->identity;
  }
}

c10::intrusive_ptr<KVStore> KVStore::from_state(StoreState state) {
  auto store = c10::make_intrusive<KVStore>(state.type);
  Keys keys;
  keys.list.append(state.int_keys.begin(), state.int_keys.end());
  keys.list.append(state.str_keys.begin(), state.str_keys.end());
  for (size_t i = 0; i < keys.list.size(); ++i) {
    // One by one, so that a value is let go of before the next is copied.
    const Key& key = keys.list[i];
    check_counter("load", key, "version", state.versions[i]);
    store->init(key, std::exchange(state.values[i], at::Tensor()));
    store->table_.find("load", key)[0]->version = state.versions[i];
  }
  if (!state.key_kind.empty()) {
    store->table_.fix_kind(
        state.key_kind == name(KeyKind::kInt) ? KeyKind::kInt : KeyKind::kStr);
  }
  if (!state.updater.empty()) {
    store->set_updater(load_updater(state.updater[0]));
  }
  if (state.optimizer) {
    // A key that was deleted may have options. In a store without keys they
    // are for keys to come.
    store->set_optimizer(
        *std::move(state.optimizer),
        /*keep_state=*/false,
        /*check_keys=*/keys.size() == 0);
    if (keys.size() != 0) {
      keys.single = false;
      store->set_optimizer_states(keys, state.states);
    }
  }
  return store;
}

void KVStore::take(KVStore& other) {
  constexpr auto* op = "load";
  check_usable(op);
  TORCHKV_INTERNAL_ASSERT(type_ == other.type_ && this != &other);
  for (const auto& entry : other.table_.entries(op)) {
    const std::lock_guard lock(entry->mutex);
    comm_->adopt(*entry);
  }
  // Both are freed after the lock is released, as in close().
  Updater updater = other.updater();
  const auto expected = other.expected_keys();
  std::vector<EntryPtr> replaced;
  {
    const std::lock_guard lock(updater_mutex_);
    if (const auto kind = table_.kind()) {
      check_key_kind(op, updater, *kind);
    }
    replaced = table_.take(op, other.table_);
    updater_.swap(updater);
    expected_keys_ = expected;
    expects_keys_ = !expected.empty();
    num_skipped_ = other.num_skipped_.load();
    grad_norm_ = kNoNorm;
  }
  other.close();
}

} // namespace torchkv

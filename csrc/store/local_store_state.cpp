// What a LocalStore hands out to be saved, and takes back.
#include <ATen/ops/argsort.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <utility>

#include "../core/errors.h"
#include "../core/in_progress.h"
#include "../core/plain_dispatch.h"
#include "../memory/layout.h"
#include "../memory/row_slices.h"
#include "../update/script_updater.h"
#include "check.h"
#include "compressed_values.h"
#include "local_store.h"
#include "shared_values.h"

namespace torchkv {
namespace {

// ValueError unless a state is that of the rows which the key has.
void check_row_ids(const char* op, Entry& entry, const KeyState& state) {
  const PlainDispatch plain;
  const Where where{op, entry.key};
  const auto ids = state.tensors.find(kRowIds);
  if (ids == state.tensors.end() && state.tensors.empty()) {
    return;
  }
  const std::lock_guard lock(entry.mutex);
  const at::Tensor own = row_ids(entry).index_select(0, slots_by_id(entry));
  TORCHKV_CHECK_VALUE(
      ids != state.tensors.end() && ids->second.scalar_type() == c10::kLong &&
          at::equal(ids->second.to(c10::kCPU), own),
      where,
      "expected the state of the ",
      own.numel(),
      " rows that the key has, by their ids as 'row_ids', but got that of "
      "others; the state of the whole store (save, state_dict) has rows and "
      "state");
}

// The state of rows in ascending order of their ids, in the order of the slots.
// REQUIRES: the entry's mutex.
KeyState by_slots(const char* op, const Entry& entry, KeyState state) {
  const PlainDispatch plain;
  const at::Tensor places = at::argsort(slots_by_id(entry));
  const Where where{op, entry.key};
  for (auto& [name, tensor] : state.tensors) {
    TORCHKV_CHECK_VALUE(
        tensor.size(0) == places.numel(),
        where,
        "expected the state of ",
        places.numel(),
        " rows, but another thread has changed their number");
    tensor = tensor.to(c10::kCPU).index_select(0, places);
  }
  return state;
}

} // namespace

StoreState LocalStore::state(bool with_keys, bool with_updater) const {
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
    if (entry->rows != nullptr) {
      state.rows[state.values.size()] = {
          row_ids(*entry),
          entry->meta.has_unlimited_rows ? std::nullopt
                                         : std::optional(entry->meta.sizes[0]),
          entry->rows->init};
    }
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
          std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater);
      opaque != nullptr && with_updater) {
    const InProgress<Store> saving(this);
    state.updater.push_back(serialize_updater(**opaque));
  }
  return state;
}

// REQUIRES: the entry's mutex, or that nobody changes the entry.
KeyState LocalStore::state_of(Entry& entry, const Optimizer& optimizer) const {
  return entry.generation == optimizer.generation
      ? slices_.state_of(entry, optimizer.rule_of(entry.key))
      : KeyState();
}

KeyState LocalStore::state_of(const Key& key, const Updater& updater) const {
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  const EntryPtr entry = table_.find("save", key)[0];
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
  entry->is_master_loaded = true;
  entry->generation = (*optimizer)->generation;
}

std::vector<KeyState> LocalStore::optimizer_states(const Keys& keys) {
  constexpr auto* op = "optimizer_states";
  const OptimizerPtr optimizer = this->optimizer(op);
  std::vector<KeyState> states;
  for (const auto& entry : table_.find(op, keys)) {
    const std::lock_guard lock(entry->mutex);
    states.push_back(state_of(*entry, *optimizer));
    if (entry->rows != nullptr) {
      const PlainDispatch plain;
      const at::Tensor slots = slots_by_id(*entry);
      for (auto& [name, tensor] : states.back().tensors) {
        tensor = tensor.index_select(0, slots);
      }
      states.back().tensors.emplace(
          kRowIds, row_ids(*entry).index_select(0, slots));
    }
  }
  return states;
}

void LocalStore::set_optimizer_states(
    const Keys& keys,
    const std::vector<KeyState>& states) {
  set_optimizer_states(keys, states, /*by_slot=*/false);
}

// The state of a row-sparse value is by slot, or in the order of the ids.
void LocalStore::set_optimizer_states(
    const Keys& keys,
    const std::vector<KeyState>& states,
    bool by_slot) {
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
  std::vector<KeyState> given = states; // without ids
  for (size_t i = 0; i < states.size(); ++i) {
    if (entries[i]->rows != nullptr && !by_slot) {
      check_row_ids(op, *entries[i], given[i]);
      given[i].tensors.erase(kRowIds);
    }
    check_state(op, *entries[i], optimizer->rule_of(entries[i]->key), given[i]);
  }
  for (size_t i = 0; i < states.size(); ++i) {
    Entry& entry = *entries[i];
    const std::lock_guard lock(entry.mutex);
    const RuleSpec rule = optimizer->rule_of(entry.key);
    if (entry.rows == nullptr || by_slot) {
      slices_.set_state(entry, rule, given[i]);
    } else {
      slices_.set_state(entry, rule, by_slots(op, entry, given[i]));
    }
    // Also those of a whole store: it may have been saved after a state was
    // loaded, and before the step that compares.
    entry.is_master_loaded = true;
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
    const auto rows = state.rows.find(i);
    if (rows == state.rows.end()) {
      insert({"init", key, &value});
    } else {
      load_rows(key, value, rows->second);
    }
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
      set_optimizer_states(keys, state.states, /*by_slot=*/true);
    }
  }
}

void LocalStore::take(Store& other_store, bool keeps_updater) {
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
    if (keeps_updater) {
      updater = updater_;
    }
    const KeyTable& keys = keeps_updater ? other.table_ : table_;
    if (const auto kind = keys.summary().kind) {
      check_key_kind(op, updater, *kind);
    }
    replaced = table_.take(op, other.table_);
    may_shard_ = is_elementwise(updater);
    updater_.swap(updater);
    compression_keys_.clear();
    compression_ = other.compression();
    compresses_ = compression_ != nullptr;
    has_row_sparse_ = has_row_sparse_ || other.has_row_sparse_;
    if (!keeps_updater) {
      set_expected_keys(std::move(taken.expected_keys));
      optimizer_step_.take(other.optimizer_step_);
    }
  }
  other.close();
}

} // namespace torchkv

// What a DistStore takes back of what was saved. All ranks make these calls.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <unordered_set>
#include <utility>

#include "../core/errors.h"
#include "../store/check.h"
#include "../store/shared_values.h"
#include "dist_store.h"
#include "held_parts.h"

namespace torchkv::dist {

// Until this rank's pushes are applied, and those of all others.
void DistStore::settle(const char* op) {
  settle_own(op);
  meet(op);
}

void DistStore::set_optimizer_states(
    const Keys& keys,
    const std::vector<KeyState>& states) {
  constexpr auto* op = "set_optimizer_states";
  const Updater updater = this->updater();
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  Entries entries;
  check_together(op, [&] {
    TORCH_CHECK_VALUE(
        optimizer != nullptr,
        op,
        ": the store has no optimizer; call set_optimizer first");
    if (!keys.list.empty()) {
      entries = table_.find(op, keys);
    }
    TORCH_CHECK_VALUE(
        states.size() == entries.size(),
        op,
        ": expected ",
        entries.size(),
        " states, one for each key, but got ",
        states.size());
    for (size_t i = 0; i < states.size(); ++i) {
      check_state(
          op, *entries[i], (*optimizer)->rule_of(entries[i]->key), states[i]);
    }
  });
  for (size_t i = 0; i < states.size(); ++i) {
    const auto places = places_of(*entries[i]);
    for (const Place& place : places) {
      if (place.server == rank()) {
        session_->applier().restore(
            entries[i]->key,
            *optimizer,
            epoch(),
            cut_state(states[i], place, places.size() > 1));
      }
    }
  }
  meet(op);
}

void DistStore::load_updater(const char* op, StoreState& state) {
  if (!state.updater.empty()) {
    set_updater(own_script(op, state.updater[0]));
    // A copy: the server's changes.
    session_->applier().set_script(epoch(), own_script(op, state.updater[0]));
    meet(op); // no push comes before
  } else if (state.optimizer) {
    set_optimizer(*std::move(state.optimizer), false, /*check_keys=*/false);
  } else if (
      began_from_snapshot_ ||
      !std::holds_alternative<std::monostate>(updater())) {
    set_updater(nullptr);
  }
}

// What a LocalStore that takes the state does not check.
void DistStore::check_loads(const char* op, const StoreState& state) const {
  table_.check_open(op);
  const auto kind = state.kind();
  table_.check_same_kind(op, kind);
  const bool compresses = state.compression && !state.compression->is_none();
  if (state.optimizer) {
    check_gradient(op, state.optimizer->gradient);
    if (compresses) {
      check_skips(op, state.optimizer->gradient);
    }
  }
  for (size_t i = 0; i < state.values.size(); ++i) {
    const bool is_int = !state.int_keys.empty();
    check_fits_messages(
        op,
        is_int ? Key(state.int_keys[i]) : Key(state.str_keys[i]),
        state.values[i]);
  }
  if (!state.updater.empty()) {
    const Updater updater = own_script(op, state.updater[0]);
    if (const auto of_keys = kind ? kind : table_.summary().kind) {
      check_key_kind(op, updater, *of_keys);
    }
  }
}

// REQUIRES: a state that a LocalStore takes, but for a packed updater, with at
// most a residual for each rank.
void DistStore::load(StoreState state) {
  constexpr auto* op = "load";
  check_together(op, [&] { check_loads(op, state); });
  const std::vector<Key> present = this->keys();
  std::unordered_set<Key, KeyHash> whole(present.begin(), present.end());
  {
    const std::lock_guard lock(updater_mutex_);
    for (const Key& key : split_keys_) {
      whole.erase(key);
    }
  }
  if (!present.empty()) {
    Keys erased;
    erased.list.append(present.begin(), present.end());
    erased.single = false;
    erase(erased);
  }
  if (const auto kind = state.kind()) {
    table_.fix_kind(*kind);
  }
  {
    const std::lock_guard lock(updater_mutex_);
    compression_ = nullptr; // which the next updater need not fit
    compression_keys_.clear();
  }
  load_updater(op, state);
  Keys keys;
  keys.list.append(state.int_keys.begin(), state.int_keys.end());
  keys.list.append(state.str_keys.begin(), state.str_keys.end());
  keys.single = false;
  // In order; those that were on one server are again.
  for (size_t begin = 0, end = 0; begin < keys.list.size(); begin = end) {
    Keys run;
    run.single = false;
    CallOptions options;
    options.whole = whole.count(keys.list[begin]) != 0;
    while (end < keys.list.size() &&
           (whole.count(keys.list[end]) != 0) == options.whole) {
      run.list.push_back(keys.list[end++]);
    }
    const Tensors values = Tensors::one_each(
        at::TensorList(state.values).slice(begin, end - begin));
    insert({"init", run, &values, nullptr, options});
    if (began_from_snapshot_) { // whose values init keeps
      assign({op, run, &values});
    }
  }
  restore_compression(state);
  if (!state.states.empty()) {
    set_optimizer_states(keys, state.states);
  }
}

// A round whose update is rank 0's value. Other threads' pushes do not come
// between the options and the push.
void DistStore::assign(const Call& call) {
  refuse_sharing(call);
  const Entries entries = find(call);
  check_one_each(call);
  check_no_repeats(call.op, entries);
  settle(call.op);
  const auto setting = hold(call.op, setting_mutex_);
  UpdateSpec restore;
  {
    const std::lock_guard lock(updater_mutex_);
    restore = spec_;
  }
  std::vector<Request> requests;
  const auto add_options = [&](bool replaces) {
    if (rank() == 0) {
      restore.replaces = replaces;
      requests.emplace_back(Request::Kind::kConfig).options = encode(restore);
    }
  };
  add_options(true);
  if (is_sync_ || rank() == 0) {
    Request& request = requests.emplace_back(Request::Kind::kPush);
    for (size_t i = 0; i < entries.size(); ++i) {
      const Meta& meta = entries[i]->meta;
      const at::Tensor value = Buffers().empty(meta.sizes, meta.dtype);
      runtime_.copy(value, call.values->flat[i]);
      Request::Item item;
      item.key = entries[i]->key;
      item.value = blob_of(value);
      item.dtype = static_cast<int32_t>(meta.dtype);
      item.item_bytes = static_cast<int32_t>(value.element_size());
      request.items.push_back(std::move(item));
    }
  }
  add_options(false);
  for (const auto& pending : begin_all(call.op, std::move(requests))) {
    wait(call.op, *pending);
  }
  meet(call.op);
}

void DistStore::take(Store& /*other*/, bool /*keeps_updater*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "load: not supported by a store on several machines");
}

} // namespace torchkv::dist

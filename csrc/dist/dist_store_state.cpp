// What a DistStore takes back of what was saved. All ranks make these calls.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <unordered_set>
#include <utility>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../core/row_sparse.h"
#include "../store/check.h"
#include "../store/parse_row_ids.h"
#include "../store/row_values.h"
#include "../store/shared_values.h"
#include "capture.h"
#include "dist_store.h"
#include "held_parts.h"
#include "row_payload.h"

namespace torchkv::dist {
namespace {

Key key_of(const StoreState& state, size_t i) {
  return state.int_keys.empty() ? Key(state.str_keys[i])
                                : Key(state.int_keys[i]);
}

} // namespace

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
  std::vector<KeyState> given = states; // without ids
  std::vector<at::Tensor> row_ids(states.size()); // of row-sparse keys
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
      std::optional<int64_t> num_rows;
      if (entries[i]->rows != nullptr) {
        row_ids[i] = checked_row_ids(op, *entries[i], states[i]);
        num_rows = row_ids[i].numel();
        given[i].tensors.erase(kRowIds);
      }
      check_state(
          op,
          *entries[i],
          (*optimizer)->rule_of(entries[i]->key),
          given[i],
          num_rows);
    }
  });
  restore_states(op, entries, given, row_ids);
}

// The ids of the rows that a state is of, in ascending order; ValueError unless
// they are those that the key has.
at::Tensor DistStore::checked_row_ids(
    const char* op,
    const Entry& entry,
    const KeyState& state) const {
  const PlainDispatch plain;
  const at::Tensor own =
      std::get<0>(at::cat(ids_of_slices(op, entry, /*min_version=*/0)).sort());
  const auto given = state.tensors.find(kRowIds);
  const Where where{op, entry.key};
  TORCHKV_CHECK_VALUE(
      (given == state.tensors.end() && state.tensors.empty()) ||
          (given != state.tensors.end() &&
           given->second.scalar_type() == c10::kLong &&
           given->second.to(c10::kCPU).equal(own)),
      where,
      "expected the state of the ",
      own.numel(),
      " rows that the key has, by their ids as '",
      kRowIds,
      "', but got that of others; the state of the whole store (save, "
      "state_dict) has rows and state");
  return own;
}

// `row_ids`: of the states of row-sparse keys, those of the key in any order.
void DistStore::restore_states(
    const char* op,
    const Entries& entries,
    const std::vector<KeyState>& states,
    const std::vector<at::Tensor>& row_ids) {
  const Updater updater = this->updater();
  const auto& optimizer = std::get<OptimizerPtr>(updater);
  for (size_t i = 0; i < states.size(); ++i) {
    const Entry& entry = *entries[i];
    const auto places = places_of(entry);
    const auto stored = entry.rows == nullptr
        ? std::vector<at::Tensor>()
        : ids_of_slices(op, entry, /*min_version=*/0, /*only_own=*/true);
    for (const Place& place : places) {
      if (place.server == rank()) {
        session_->applier().restore(
            entry.key,
            optimizer,
            epoch(),
            entry.rows == nullptr
                ? cut_state(states[i], place, places.size() > 1)
                : state_of_rows(
                      states[i],
                      row_ids[i],
                      stored[static_cast<size_t>(place.index)]));
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
    check_fits_messages(op, key_of(state, i), state.values[i].dim());
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
  check_together(op, [&] {
    check_loads(op, state);
    for (auto& [i, rows] : state.rows) {
      const Where where{op, key_of(state, i)};
      const at::Tensor& value = state.values[i];
      const Meta meta = row_sparse_meta(
          where, rows.num_rows, value.sizes().slice(1), value.scalar_type());
      rows.ids = parse_row_ids(where, meta, rows.ids);
    }
  });
  const std::vector<Key> present = this->keys();
  // As they were initialized, which a restarted job does again.
  std::unordered_set<Key, KeyHash> whole;
  {
    const std::lock_guard lock(updater_mutex_);
    whole = whole_keys_;
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
  // In order.
  for (size_t begin = 0, end = 0; begin < keys.list.size(); begin = end) {
    Keys run;
    run.single = false;
    CallOptions options;
    options.whole = whole.count(keys.list[begin]) != 0;
    if (state.rows.count(begin) != 0) {
      insert_saved("init", keys.list[begin], state, begin, options.whole);
      ++end;
      continue;
    }
    while (end < keys.list.size() && state.rows.count(end) == 0 &&
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
    std::vector<at::Tensor> row_ids(state.states.size());
    for (const auto& [i, rows] : state.rows) {
      row_ids[i] = rows.ids;
    }
    restore_states(op, table_.find(op, keys), state.states, row_ids);
  }
}

// A round whose update is rank 0's value. Other threads' pushes do not come
// between the options and the push.
void DistStore::assign(const Call& given) {
  refuse_sharing(given);
  const Entries entries = table_.find(given.op, given.keys);
  check_one_each(given, /*takes_rows=*/true);
  for (size_t i = 0; i < entries.size(); ++i) {
    const Where where{given.op, entries[i]->key};
    TORCHKV_CHECK_NOT_IMPLEMENTED(
        entries[i]->rows != nullptr || !is_sparse_coo(given.values->flat[i]),
        where,
        "expected a dense tensor, as the key is dense, but got a sparse one");
  }
  const auto rows = with_rows(given, entries, runtime_);
  Call call = given;
  call.values = rows ? &*rows : given.values;
  check_not_capturing(call, runtime_);
  check_values(call, entries);
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
      const at::Tensor& pushed = call.values->flat[i];
      const bool is_table = entries[i]->rows != nullptr;
      // Rows travel in their dtype.
      const at::Tensor value = is_table
          ? pushed.contiguous()
          : Buffers().empty(meta.sizes, meta.dtype);
      Request::Item item;
      item.key = entries[i]->key;
      item.dtype = static_cast<int32_t>(value.scalar_type());
      item.item_bytes = static_cast<int32_t>(value.element_size());
      if (is_table) {
        const auto places = places_of(*entries[i]);
        item.codes = pack_rows(
            dynamic_cast<const RowSparse&>(*call.values->encodings[i]),
            value,
            spec_of(meta, places.size() == 1),
            places,
            Buffers());
      } else {
        runtime_.copy(value, pushed);
        item.value = blob_of(value);
      }
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

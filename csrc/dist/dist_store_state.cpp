// What a DistStore hands out to be saved, and takes back. All ranks make these
// calls: a rank reads and writes what its own server holds, and the ranks tell
// each other by a store of their own.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <unordered_set>
#include <utility>

#include "../core/errors.h"
#include "../store/check.h"
#include "../store/shared_values.h"
#include "../update/script_updater.h"
#include "bytes.h"
#include "dist_store.h"
#include "errors.h"

namespace torchkv::dist {
namespace {

constexpr auto* kSave = "save";

at::Tensor as_tensor(const std::vector<Blob>& bytes) {
  int64_t size = 0;
  for (const auto& blob : bytes) {
    size += static_cast<int64_t>(blob.size());
  }
  at::Tensor result = at::empty({size}, at::kByte);
  copy_pieces(bytes, result.mutable_data_ptr());
  return result;
}

// What one server holds of a key.
struct Part {
  int32_t index = 0;
  int64_t version = 0;
  Blob value;
  KeyState state; // of flat tensors
};
using Parts = std::vector<Part>;

void write_part(ByteWriter& out, const SliceId& slice, const Shot& shot) {
  out.add(slice.key);
  out.add(slice.index);
  out.add(shot.version);
  out.add(shot.value->pieces);
  const auto* stored = dynamic_cast<const StoredValue*>(shot.value.get());
  write_state(
      out, stored != nullptr && stored->state ? *stored->state : KeyState());
}

std::unordered_map<Key, Parts, KeyHash> read_parts(
    const std::vector<at::Tensor>& of_servers) {
  std::unordered_map<Key, Parts, KeyHash> result;
  for (const auto& bytes : of_servers) {
    ByteReader in(blob_of(bytes), kSave);
    for (uint64_t i = in.count(); i > 0; --i) {
      Parts& parts = result[in.key()];
      Part part;
      part.index = in.number<int32_t>();
      part.version = in.number<int64_t>();
      part.value = in.blob();
      part.state = read_state(in);
      parts.push_back(std::move(part));
    }
    in.end();
  }
  for (auto& [key, parts] : result) {
    std::sort(parts.begin(), parts.end(), [](auto& a, auto& b) {
      return a.index < b.index;
    });
  }
  return result;
}

at::Tensor join_values(const Parts& parts, const Meta& meta) {
  std::vector<Blob> pieces;
  for (const auto& part : parts) {
    pieces.push_back(part.value);
  }
  at::Tensor value = at::empty(meta.sizes, at::TensorOptions(meta.dtype));
  copy_pieces(pieces, value.mutable_data_ptr());
  return value;
}

KeyState join_states(const Parts& parts, const Meta& meta) {
  KeyState result;
  result.step = parts[0].state.step;
  result.num_accumulated = parts[0].state.num_accumulated;
  for (const auto& [name, first] : parts[0].state.tensors) {
    std::vector<Blob> pieces;
    for (const auto& part : parts) {
      const auto found = part.state.tensors.find(name);
      TORCH_CHECK(
          found != part.state.tensors.end(),
          kSave,
          ": the servers keep different states of a key");
      pieces.push_back(blob_of(found->second.contiguous()));
    }
    at::Tensor joined = at::empty(meta.sizes, first.options());
    copy_pieces(pieces, joined.mutable_data_ptr());
    result.tensors[name] = std::move(joined);
  }
  return result;
}

// Elements [begin, end) of each tensor.
KeyState cut_state(const KeyState& state, const Place& place, bool is_split) {
  KeyState result;
  result.step = state.step;
  result.num_accumulated = state.num_accumulated;
  for (const auto& [name, tensor] : state.tensors) {
    const at::Tensor part = is_split
        ? tensor.contiguous().flatten().slice(0, place.begin, place.end)
        : tensor;
    result.tensors[name] = part.clone(at::MemoryFormat::Contiguous);
  }
  return result;
}

} // namespace

// Until this rank's pushes are applied, and those of all others.
void DistStore::settle(const char* op) {
  settle_own(op);
  meet(op);
}

// What this rank's server holds of the keys.
at::Tensor DistStore::own_parts(const Keys& keys) {
  Shard shard = session_->held(kSave, keys, timeout_);
  ByteWriter out;
  out.add(static_cast<uint64_t>(shard.slices.size()));
  for (const auto& [slice, shot] : shard.slices) {
    write_part(out, slice, *shot);
  }
  return as_tensor(out.take());
}

StoreState DistStore::state(bool with_keys) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !with_keys,
      kSave,
      ": a store on several machines cannot be copied by pickle, copy.deepcopy "
      "or torch.jit.save; its save(path) and state_dict() are for all ranks to "
      "call");
  StoreState state;
  const Updater updater = this->updater();
  const auto* opaque = std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater);
  const bool is_script = opaque != nullptr &&
      dynamic_cast<const ScriptUpdater*>(opaque->get()) != nullptr;
  TORCH_CHECK_TYPE(
      is_script || opaque == nullptr,
      kSave,
      ": expected an updater that can be copied (none, a built-in optimizer or "
      "TorchScript), but got a Python callable; call set_updater(None) first");
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  if (optimizer != nullptr) {
    state.optimizer = **optimizer;
  }
  if (is_script) {
    state.updater.push_back(serialize_updater(**opaque));
  }
  if (const auto kind = table_.summary().kind) {
    state.key_kind = name(*kind);
  }
  return state;
}

StoreState DistStore::gather_state() {
  const std::lock_guard calls(gather_mutex_);
  StoreState state = this->state(/*with_keys=*/false);
  begin_gather(kSave);
  if (!state.updater.empty()) {
    state.updater = gather_scripts();
  }
  Keys keys;
  keys.single = false;
  for (const Key& key : this->keys()) {
    keys.list.push_back(key);
  }
  if (keys.list.empty()) {
    return state;
  }
  const auto parts = read_parts(
      gather(kSave, GatherStage::kParts, own_parts(keys), /*to_all=*/false));
  for (const auto& entry :
       parts.empty() ? Entries() : table_.find(kSave, keys)) {
    const Key& key = entry->key;
    const Parts& of_key = parts.at(key);
    if (key.kind() == KeyKind::kInt) {
      state.int_keys.push_back(key.id());
    } else {
      state.str_keys.push_back(key.text());
    }
    state.values.push_back(join_values(of_key, entry->meta));
    state.versions.push_back(of_key[0].version);
    if (state.optimizer) {
      state.states.push_back(join_states(of_key, entry->meta));
    }
  }
  return state;
}

std::vector<KeyState> DistStore::optimizer_states(const Keys& keys) {
  constexpr auto* op = "optimizer_states";
  const std::lock_guard calls(gather_mutex_);
  TORCH_CHECK_VALUE(
      std::holds_alternative<OptimizerPtr>(updater()),
      op,
      ": the store has no optimizer; call set_optimizer first");
  const Entries entries = table_.find(op, keys);
  begin_gather(op);
  const auto parts = read_parts(
      gather(op, GatherStage::kParts, own_parts(keys), /*to_all=*/true));
  std::vector<KeyState> states;
  for (const auto& entry : entries) {
    states.push_back(join_states(parts.at(entry->key), entry->meta));
  }
  return states;
}

void DistStore::set_optimizer_states(
    const Keys& keys,
    const std::vector<KeyState>& states) {
  constexpr auto* op = "set_optimizer_states";
  const Updater updater = this->updater();
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  TORCH_CHECK_VALUE(
      optimizer != nullptr,
      op,
      ": the store has no optimizer; call set_optimizer first");
  const Entries entries = table_.find(op, keys);
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
  settle(op);
  for (size_t i = 0; i < states.size(); ++i) {
    const auto places = places_of(*entries[i]);
    for (const Place& place : places) {
      if (place.server == rank()) {
        session_->applier().restore(
            entries[i]->key,
            updater,
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
  } else if (!std::holds_alternative<std::monostate>(updater())) {
    set_updater(nullptr);
  }
}

// What a LocalStore that takes the state does not check.
void DistStore::check_loads(const char* op, const StoreState& state) const {
  table_.check_open(op);
  const auto kind = state.kind();
  table_.check_same_kind(op, kind);
  if (state.optimizer) {
    check_gradient(op, state.optimizer->gradient);
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

// REQUIRES: a state that a LocalStore takes, but for a packed updater.
void DistStore::load(StoreState state) {
  constexpr auto* op = "load";
  check_loads(op, state);
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
  }
  if (!state.states.empty()) {
    set_optimizer_states(keys, state.states);
  }
}

// A round whose update is rank 0's value.
void DistStore::assign(const Call& call) {
  refuse_sharing(call);
  const Entries entries = find(call);
  check_one_each(call);
  check_no_repeats(call.op, entries);
  settle(call.op);
  const std::lock_guard setting(setting_mutex_);
  UpdateSpec restore;
  {
    const std::lock_guard lock(updater_mutex_);
    restore = spec_;
  }
  const bool pushes = is_sync_ || rank() == 0;
  Request request(Request::Kind::kPush);
  if (pushes) { // before the servers replace values, as memory may run out
    for (size_t i = 0; i < entries.size(); ++i) {
      const Meta& meta = entries[i]->meta;
      const at::Tensor value =
          at::empty(meta.sizes, at::TensorOptions(meta.dtype));
      runtime_.copy(value, call.values->flat[i]);
      Request::Item item;
      item.key = entries[i]->key;
      item.value = blob_of(value);
      item.dtype = static_cast<int32_t>(meta.dtype);
      item.item_bytes = static_cast<int32_t>(value.element_size());
      request.items.push_back(std::move(item));
    }
  }
  UpdateSpec replace = restore;
  replace.kind = UpdateSpec::Kind::kReplace;
  send_spec(call.op, replace);
  PendingPtr pending;
  if (pushes) {
    pending = begin(call.op, std::move(request));
  }
  // Not after the push, which may fail: later ones are no assignments.
  send_spec(call.op, restore);
  if (pending != nullptr) {
    wait(call.op, *pending);
  }
  meet(call.op);
}

void DistStore::take(Store& /*other*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "load: not supported by a store on several machines");
}

} // namespace torchkv::dist

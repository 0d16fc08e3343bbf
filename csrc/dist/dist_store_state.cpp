// What a DistStore hands out to be saved, and takes back. All ranks make these
// calls: a rank reads and writes what its own server holds, and the ranks tell
// each other by a store of their own.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <utility>

#include "../core/errors.h"
#include "../store/check.h"
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
  table_.check_open(op);
  session_->join(op, timeout_);
  session_->flush();
  barrier();
}

// A store for bytes, of the same ranks: made when it is first needed.
DistStore& DistStore::exchange_store() {
  if (exchange_ == nullptr) {
    StoreOptions options;
    options.name = c10::str(name_, "#exchange");
    options.rank = rank();
    options.world_size = num_workers();
    options.rendezvous = node_->rendezvous();
    options.security = node_->security();
    options.timeout = timeout_;
    options.heartbeat = session_->config().heartbeat;
    Policy policy;
    policy.quorum = 1;
    exchange_ =
        std::make_unique<DistStore>("dist_async", policy, runtime_, options);
  }
  return *exchange_;
}

// Each rank's bytes, on rank 0 or on all.
std::vector<at::Tensor> DistStore::gather(
    const at::Tensor& bytes,
    bool to_all) {
  DistStore& store = exchange_store();
  const int64_t ranks = num_workers();
  // Int keys: the sizes, then each rank's bytes.
  const Tensors no_sizes(at::zeros({ranks}, at::kLong));
  store.insert({kSave, Key(-1), &no_sizes});
  for (int64_t i = 0; i < ranks; ++i) { // one at a time: ASSIGN keeps the last
    if (i == rank()) {
      const Tensors current = Tensors::one_each(store.pull(Key(-1), {}));
      current.flat[0].data_ptr<int64_t>()[i] = bytes.numel();
      store.merge({kSave, Key(-1), &current});
      store.session_->flush();
    }
    store.barrier();
  }
  const at::Tensor sizes = store.pull(Key(-1), {})[0];
  Keys keys(Key(-1));
  keys.single = false;
  std::vector<at::Tensor> result;
  for (int64_t i = 0; i < ranks; ++i) {
    const Tensors empty(at::empty({sizes.data_ptr<int64_t>()[i]}, at::kByte));
    store.insert({kSave, Key(i), &empty});
    keys.list.push_back(Key(i));
  }
  const Tensors own(bytes);
  store.merge({kSave, Key(rank()), &own});
  store.session_->flush();
  store.barrier();
  for (int64_t i = 0; i < ranks && (to_all || rank() == 0); ++i) {
    result.push_back(store.pull(Key(i), {})[0]);
  }
  store.erase(keys);
  return result;
}

// What this rank's server holds of the keys.
at::Tensor DistStore::own_parts(const Keys& keys) {
  Shard shard = session_->held(keys);
  ByteWriter out;
  out.add(static_cast<uint64_t>(shard.slices.size()));
  for (const auto& [slice, shot] : shard.slices) {
    write_part(out, slice, *shot);
  }
  return as_tensor(out.take());
}

StoreState DistStore::gather_state(bool with_keys) {
  const std::lock_guard calls(gather_mutex_);
  StoreState state;
  const Updater updater = this->updater();
  TORCH_CHECK_TYPE(
      !std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(updater),
      kSave,
      ": expected no updater or a built-in optimizer, since the servers' copies "
      "of another updater keep their own state");
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  if (optimizer != nullptr) {
    state.optimizer = **optimizer;
  }
  settle(kSave);
  if (const auto kind = table_.summary().kind) {
    state.key_kind = name(*kind);
  }
  Keys keys;
  keys.single = false;
  for (const Key& key : this->keys()) {
    keys.list.push_back(key);
  }
  if (!with_keys || keys.list.empty()) {
    return state;
  }
  const auto parts = read_parts(gather(own_parts(keys), /*to_all=*/false));
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
    if (optimizer != nullptr) {
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
  settle(op);
  const auto parts = read_parts(gather(own_parts(keys), /*to_all=*/true));
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
  barrier();
}

void DistStore::load(StoreState state) {
  constexpr auto* op = "load";
  TORCH_CHECK_VALUE(
      table_.summary().num_keys == 0,
      op,
      ": expected a store without keys, as stores on several machines keep "
      "theirs");
  TORCH_CHECK_TYPE(
      state.updater.empty(),
      op,
      ": expected no updater or a built-in optimizer");
  // What the ranks must know beforehand: rank 0's keys.
  Keys keys;
  keys.list.append(state.int_keys.begin(), state.int_keys.end());
  keys.list.append(state.str_keys.begin(), state.str_keys.end());
  keys.single = false;
  if (state.optimizer) {
    set_optimizer(*std::move(state.optimizer), false, /*check_keys=*/false);
  }
  if (keys.list.empty()) {
    return;
  }
  const Tensors values = Tensors::one_each(state.values);
  insert({"init", keys, &values});
  if (!state.states.empty()) {
    set_optimizer_states(keys, state.states);
  }
}

// A round whose update is rank 0's value.
void DistStore::assign(const Call& call) {
  const Entries entries = find(call);
  check_one_each(call);
  check_no_repeats(call.op, entries);
  settle(call.op);
  UpdateSpec replace;
  replace.kind = UpdateSpec::Kind::kReplace;
  UpdateSpec restore;
  {
    const std::lock_guard lock(updater_mutex_);
    restore = spec_;
    replace.epoch = spec_.epoch;
  }
  const std::lock_guard setting(setting_mutex_);
  send_spec(call.op, replace);
  PendingPtr pending;
  if (is_sync_ || rank() == 0) {
    Request request(Request::Kind::kPush);
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
    pending = begin(call.op, std::move(request));
  }
  // Not after the push, which may fail: later ones are no assignments.
  send_spec(call.op, restore);
  if (pending != nullptr) {
    wait(call.op, *pending);
  }
  barrier();
}

StoreState DistStore::state(bool /*with_keys*/) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "save: a store on several machines cannot be copied by pickle, "
      "copy.deepcopy or torch.jit.save; its save(path) and state_dict() are "
      "for all ranks to call");
}

void DistStore::take(Store& /*other*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "load: not supported by a store on several machines");
}

} // namespace torchkv::dist

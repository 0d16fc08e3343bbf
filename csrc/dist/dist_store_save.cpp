// What a DistStore hands out to be saved. All ranks make these calls.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../core/plain_dispatch.h"
#include "../update/script_archives.h"
#include "../update/script_updater.h"
#include "dist_store.h"
#include "errors.h"
#include "held_parts.h"

namespace torchkv::dist {
namespace {

void append(
    StoreState& state,
    const Entry& entry,
    const Parts& parts,
    c10::IntArrayRef sizes) {
  if (entry.key.kind() == KeyKind::kInt) {
    state.int_keys.push_back(entry.key.id());
  } else {
    state.str_keys.push_back(entry.key.text());
  }
  c10::SmallVector<int64_t, 4> of_value(sizes);
  if (const auto& row_init = parts[0].row_init) {
    auto [ids, values] = join_rows(parts, entry.meta);
    of_value.assign(values.sizes().begin(), values.sizes().end());
    StoreState::Rows& rows = state.rows[state.values.size()];
    rows.ids = std::move(ids);
    if (!entry.meta.has_unlimited_rows) {
      rows.num_rows = entry.meta.sizes[0];
    }
    rows.init = *row_init;
    state.values.push_back(std::move(values));
  } else {
    state.values.push_back(join_values(parts, sizes, entry.meta.dtype));
  }
  state.versions.push_back(parts[0].version);
  if (state.optimizer) {
    state.states.push_back(join_states(parts, of_value));
  }
}

// In ascending order of the ids, which it has, too.
KeyState state_by_id(const Parts& parts, const Meta& meta) {
  const PlainDispatch plain;
  const auto [ids, values] = join_rows(parts, meta);
  const at::Tensor sorted = std::get<0>(ids.sort());
  KeyState state =
      state_of_rows(join_states(parts, values.sizes()), ids, sorted);
  state.tensors[kRowIds] = sorted;
  return state;
}

// As the residuals of replicas: position i is rank i's.
void append_unsent(
    StoreState& state,
    const Entry& entry,
    const std::vector<UnsentByKey>& of_ranks) {
  auto& residuals = state.residuals.emplace_back();
  int64_t& count = state.num_compressed.emplace_back();
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const auto found = of_ranks[rank].find(entry.key);
    if (found == of_ranks[rank].end()) {
      continue; // this rank does not compress
    }
    count = std::max(count, found->second.num_compressed);
    if (found->second.residual.defined()) {
      const PlainDispatch plain;
      const at::Tensor own = found->second.residual.view(entry.meta.sizes);
      while (residuals.size() < rank) {
        residuals.push_back(at::zeros_like(own));
      }
      residuals.push_back(own);
    }
  }
}

} // namespace

StoreState DistStore::state(bool with_keys, bool with_updater) const {
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
      is_script || opaque == nullptr || !with_updater,
      kSave,
      ": expected an updater that can be copied (none, a built-in optimizer or "
      "TorchScript), but got a Python callable; call set_updater(None) first");
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  if (optimizer != nullptr) {
    state.optimizer = **optimizer;
  }
  if (is_script && with_updater) {
    state.updater.push_back(serialize_updater(**opaque));
  }
  if (const auto kind = table_.summary().kind) {
    state.key_kind = name(*kind);
  }
  if (const CompressionPtr compression = this->compression()) {
    state.compression = compression->get();
  }
  return state;
}

// Begins a call that saves: without keys; with the servers' updaters, if asked.
StoreState DistStore::begin_state(bool with_updater) {
  StoreState state = this->state(/*with_keys=*/false, with_updater);
  begin_rounds(kSave);
  if (!state.updater.empty()) {
    state.updater = gather_scripts();
  }
  return state;
}

Keys DistStore::all_keys() const {
  Keys keys;
  keys.single = false;
  for (const Key& key : this->keys()) {
    keys.list.push_back(key);
  }
  return keys;
}

OwnState DistStore::own_state() {
  const auto calls = hold(kSave, gather_mutex_);
  return guarded([&] {
    OwnState own{begin_state(/*with_updater=*/true), {}, {}};
    const Keys keys = all_keys();
    const PartsByKey parts = parts_of(session_->held(kSave, keys, timeout_));
    for (const auto& entry :
         keys.list.empty() ? Entries() : table_.find(kSave, keys)) {
      const auto held = parts.find(entry->key);
      if (held == parts.end()) {
        continue;
      }
      const auto places = places_of(*entry);
      const Place& place = places[static_cast<size_t>(held->second[0].index)];
      const bool is_whole = places.size() == 1;
      append(
          own.state,
          *entry,
          held->second,
          is_whole ? c10::IntArrayRef(entry->meta.sizes)
                   : c10::IntArrayRef(place.end - place.begin));
      const int64_t begin = entry->rows == nullptr ? place.begin : place.index;
      own.begins.push_back(is_whole ? -1 : begin);
    }
    if (own.state.compression) {
      add_unsent(own, keys);
    }
    return own;
  });
}

StoreState DistStore::gather_state(bool with_updater) {
  const auto calls = hold(kSave, gather_mutex_);
  return guarded([&] {
    StoreState state = begin_state(with_updater);
    const Keys keys = all_keys();
    if (keys.list.empty()) {
      return state;
    }
    const auto [parts, unsent] = read_parts(exchanged(
        kSave,
        kParts,
        write_parts(session_->held(kSave, keys, timeout_), this->unsent(keys)),
        /*to_all=*/false));
    for (const auto& entry :
         parts.empty() ? Entries() : table_.find(kSave, keys)) {
      append(state, *entry, parts.at(entry->key), entry->meta.sizes);
      if (state.compression) {
        append_unsent(state, *entry, unsent);
      }
    }
    return state;
  });
}

std::vector<KeyState> DistStore::optimizer_states(const Keys& keys) {
  constexpr auto* op = "optimizer_states";
  const auto calls = hold(op, gather_mutex_);
  TORCH_CHECK_VALUE(
      std::holds_alternative<OptimizerPtr>(updater()),
      op,
      ": the store has no optimizer; call set_optimizer first");
  const Entries entries = table_.find(op, keys);
  begin_rounds(op);
  return guarded([&] {
    const PartsByKey parts =
        read_parts(exchanged(
                       op,
                       kParts,
                       write_parts(session_->held(op, keys, timeout_)),
                       /*to_all=*/true))
            .parts;
    std::vector<KeyState> states;
    for (const auto& entry : entries) {
      const Parts& of_key = parts.at(entry->key);
      states.push_back(
          entry->rows == nullptr ? join_states(of_key, entry->meta.sizes)
                                 : state_by_id(of_key, entry->meta));
    }
    return states;
  });
}

// The servers' copies of a TorchScript updater, each with a state of its own;
// on rank 0.
std::vector<at::Tensor> DistStore::gather_scripts() {
  const PlainDispatch plain;
  const int64_t epoch = this->epoch();
  const auto script = session_->applier().script(kSave, epoch, timeout_);
  auto archives = exchanged(
      kSave,
      kScripts,
      script != nullptr ? serialize_updater(*script)
                        : at::empty({0}, at::kByte),
      /*to_all=*/false);
  if (archives.empty()) {
    return {};
  }
  // As it was set, where no key of the server has been updated.
  at::Tensor set;
  {
    const std::lock_guard lock(updater_mutex_);
    set = spec_.archive;
  }
  const at::Tensor first = ScriptUpdater::load(set)->serialize();
  for (auto& archive : archives) {
    if (archive.numel() == 0) {
      archive = first;
    }
  }
  return {pack_archives(archives)};
}

// This rank's copy of a saved TorchScript updater. All ranks refuse what one
// cannot load.
std::shared_ptr<OpaqueUpdater> DistStore::own_script(
    const char* op,
    const at::Tensor& bytes) const {
  const auto archives = unpack_archives(bytes);
  TORCH_CHECK_VALUE(
      archives.size() == 1 ||
          archives.size() == static_cast<size_t>(num_workers()),
      op,
      ": expected as many ranks as have saved the store, ",
      archives.size(),
      ", but got ",
      num_workers(),
      ": the updater has a state of its own on each");
  std::vector<std::shared_ptr<OpaqueUpdater>> scripts;
  scripts.reserve(archives.size());
  for (const auto& archive : archives) {
    try {
      scripts.push_back(ScriptUpdater::load(archive));
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(
          false,
          op,
          ": expected an updater that TorchScript can read, but got bytes that "
          "it refuses: ",
          error.what_without_backtrace());
    }
  }
  return scripts[scripts.size() == 1 ? 0 : static_cast<size_t>(rank())];
}

} // namespace torchkv::dist

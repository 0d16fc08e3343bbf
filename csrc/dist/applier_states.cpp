// What an applier's keys begin with, and what optimizers keep for them, also in
// snapshots.
#include <memory>
#include <utility>

#include "applier.h"
#include "errors.h"
#include "slice_shape.h"

namespace torchkv::dist {

// Puts the value that init, or a snapshot, has brought into the store. A state
// that is to be restored waits for an update that has an optimizer.
void Applier::prepare(const Begun& slice, const Updates::Update& update) {
  const Key& key = slice.slice.key;
  const auto found = held_.find(key);
  if (found == held_.end() || found->second.kid != slice.kid) {
    if (found != held_.end()) {
      store_.erase(key);
      held_.erase(found);
    }
    if (slice.spec->is_row_sparse()) {
      insert_rows(slice);
      // So that the noise of rows on two servers differs.
      constexpr int64_t kApart = 1'000'000'000'000; // elements
      store_.set_offset(key, slice.slice.index * kApart);
    } else {
      const Tensors value(tensor_of(
          slice.source->pieces,
          SliceShape(key, *slice.spec, slice.num_elements, config_).sizes,
          static_cast<c10::ScalarType>(slice.spec->dtype),
          buffers_));
      store_.insert({"init", key, &value});
      store_.set_offset(key, begin_of(slice.slice, *slice.spec, config_));
    }
    held_[key] = {slice.kid, {}};
    const auto* stored = dynamic_cast<const StoredValue*>(slice.source.get());
    if (stored != nullptr && stored->state) {
      restored_.emplace(key, *stored->state);
    }
  }
  // Rows that are replaced take what is kept for those that stay with them.
  const bool has_rows_to_restore =
      slice.spec->is_row_sparse() && restored_.count(key) != 0;
  if (update.replaces && !has_rows_to_restore) {
    return;
  }
  const auto* optimizer = std::get_if<OptimizerPtr>(&update.updater);
  held_[key].optimizer = optimizer == nullptr ? nullptr : *optimizer;
  const auto given = restored_.find(key);
  if (given != restored_.end()) {
    // Reported once if it does not fit.
    KeyState state = std::move(given->second);
    restored_.erase(given);
    set_state(key, update.updater, std::move(state));
  }
}

void Applier::restore(
    const Key& key,
    const OptimizerPtr& optimizer,
    int64_t epoch,
    KeyState state) {
  // As decode_update_spec numbers them.
  auto used = std::make_shared<Optimizer>(*optimizer);
  used->generation = static_cast<uint64_t>(epoch) + 1;
  auto shared = std::make_shared<KeyState>(std::move(state));
  enqueue([this, key, used = OptimizerPtr(std::move(used)), shared] {
    const auto held = held_.find(key);
    ++num_restored_;
    if (held == held_.end()) {
      restored_[key] = std::move(*shared);
    } else {
      set_state(key, used, std::move(*shared));
      held->second.optimizer = used;
      restored_.erase(key); // of a snapshot
    }
  });
}

// States of a slice are those of its elements in order, whatever its shape.
void Applier::set_state(
    const Key& key,
    const Updater& updater,
    KeyState state) {
  const auto meta = store_.meta("load", key);
  for (auto& [name, tensor] : state.tensors) {
    if (meta && tensor.dim() == 1 && tensor.numel() == meta->num_elements) {
      tensor = tensor.view(meta->sizes);
    }
  }
  store_.set_state_of(key, updater, state);
}

// What the optimizer keeps for the key now.
std::optional<KeyState> Applier::state_of(const SliceId& slice, int64_t kid) {
  const auto held = held_.find(slice.key);
  if (held != held_.end() && held->second.kid != kid) {
    return std::nullopt; // of another incarnation
  }
  const auto given = restored_.find(slice.key);
  if (given != restored_.end()) {
    return given->second;
  }
  if (held == held_.end()) {
    return std::nullopt;
  }
  const OptimizerPtr& optimizer = held->second.optimizer;
  return optimizer == nullptr ? KeyState()
                              : store_.state_of(slice.key, optimizer);
}

// Before the state of a value that a snapshot refers to is written.
void Applier::keep_state(const Round& round) {
  auto* stored = dynamic_cast<StoredValue*>(round.source.get());
  if (round.in_snapshot && stored != nullptr && !stored->state) {
    if (stored->is_live) {
      stored->rows = stored_rows(round.slice, round.kid);
    }
    stored->state = state_of(round.slice, round.kid);
  }
}

void Applier::complete(Shard shard, Completed done) {
  auto shared = std::make_shared<Shard>(std::move(shard));
  complete([shared] { return std::move(*shared); }, std::move(done));
}

void Applier::complete(std::function<Shard()> make, Completed done) {
  enqueue([this, make = std::move(make), done = std::move(done)] {
    Shard shard;
    const auto error = error_of([&] {
      shard = make();
      add_states(shard);
    });
    done(std::move(shard), error);
  });
}

void Applier::add_states(const Shard& shard) {
  for (const auto& [slice, shot] : shard.slices) {
    const auto* kept = dynamic_cast<const StoredValue*>(shot->value.get());
    const bool is_live = kept != nullptr && kept->is_live;
    // By keep_state, or of a snapshot that the job began with.
    const bool has_state =
        kept != nullptr && kept->state && restored_.count(slice.key) == 0;
    if (has_state && !is_live) {
      continue;
    }
    // Else it is the current value, or as init has brought it, without a state
    // but one to be restored. A copy: restore may replace the state.
    auto value = std::make_shared<StoredValue>();
    const bool is_current = kept != nullptr || restored_.count(slice.key) != 0;
    value->state = has_state ? kept->state
        : is_current         ? state_of(slice, shot->kid)
                             : KeyState();
    if (!is_live) {
      value->pieces = shot->value->pieces;
    } else if (has_state) {
      value->pieces = kept->rows;
    } else {
      value->pieces = stored_rows(slice, shot->kid);
    }
    shot->value = std::move(value);
  }
}

} // namespace torchkv::dist

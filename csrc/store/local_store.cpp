#include "local_store.h"

#include <algorithm>
#include <utility>

#include "../comm/nccl_collective.h"
#include "../core/errors.h"
#include "../core/in_progress.h"
#include "../memory/row_slices.h"
#include "check.h"
#include "compressed_values.h"
#include "count_calls.h"
#include "locked_ranges.h"
#include "row_values.h"
#include "shared_values.h"
#include "written_outs.h"

namespace torchkv {

LocalStore::LocalStore(Runtime& runtime, Options options)
    : only_cpu_(options.policy == Placement::Policy::kCpu),
      streams_(runtime),
      slices_(streams_, std::move(options.allocator)),
      placement_(options.policy, slices_, streams_, Places(options.places)),
      reducer_(
          slices_,
          placement_,
          streams_,
          options.nccl ? std::make_unique<NcclCollective>(slices_, streams_)
                       : nullptr),
      optimizer_step_(
          reducer_,
          placement_,
          slices_,
          [this] { return current_optimizer(); },
          std::move(options.combine)) {}

Entries LocalStore::make_entries(const Call& call) const {
  check_count(call.op, call.keys, *call.values);
  table_.check_absent(call.op, call.keys);
  check_key_kind(call.op, updater(), call.keys.list[0].kind());
  check_one_each(call, /*takes_rows=*/!call.options.share);
  Entries entries;
  for (size_t i = 0; i < call.keys.list.size(); ++i) {
    const at::Tensor& value = call.values->flat[i];
    const bool is_row_sparse = is_sparse_coo(value);
    if (is_row_sparse) {
      const Where where{call.op, call.keys.list[i]};
      check_rows(where, value);
      check_dtype(where, value.scalar_type());
    }
    Meta meta{
        c10::SmallVector<int64_t, 4>(value.sizes()),
        value.scalar_type(),
        value.numel(),
        is_row_sparse};
    entries.push_back(
        c10::make_intrusive<Entry>(call.keys.list[i], std::move(meta)));
    if (is_row_sparse) {
      make_row_sparse(*entries.back(), RowInit());
    }
  }
  check_outs(call, entries);
  return entries;
}

WorkPtr LocalStore::insert(const Call& given) {
  std::optional<AsyncScope> scope;
  const Entries entries = make_entries(given);
  const std::optional<Tensors> rows =
      with_rows(given, entries, streams_.runtime);
  Call call = given;
  call.values = rows ? &*rows : given.values;
  if (call.options.share) {
    check_shareable(call, table_.entries(call.op), only_cpu_);
    has_shared_ = true;
  }
  enter(scope, call, entries);
  const auto values = rows ? std::make_unique<Groups>(entries, *rows) : nullptr;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i]->rows != nullptr) {
      replace_rows(*values, i, {});
    } else {
      placement_.store(*entries[i], call.values->flat[i], call.options.share);
    }
  }
  {
    // Held over both, or set_updater could slip in between with an updater for
    // the other kind of keys.
    const std::lock_guard lock(updater_mutex_);
    check_key_kind(call.op, updater_, entries[0]->key.kind());
    table_.insert(call.op, entries);
  }
  if (call.outs != nullptr) {
    copy_out(Groups(entries, *call.outs));
  }
  return scope ? scope->finish() : nullptr;
}

// The entries of a call whose values `updater` merges, after all checks.
Entries LocalStore::find(const Call& call, const Updater& updater) const {
  Entries entries = table_.find(call.op, call.keys);
  check(call, entries, updater);
  return entries;
}

bool LocalStore::check(
    const Call& call,
    const Entries& entries,
    const Updater& updater) const {
  bool are_usual = check_values(call, entries);
  are_usual = check_outs(call, entries) && are_usual;
  if (has_shared_) {
    // Values to share are not read: keys may exchange theirs.
    check_shared(call.options.share ? Call{call.op, call.keys} : call, entries);
  }
  if (std::holds_alternative<OptimizerPtr>(updater)) {
    for (const auto& entry : entries) {
      check_optimizable(call.op, *entry);
    }
  }
  if (call.values != nullptr) {
    for (const auto& entry : entries) {
      check_steps_rows(call.op, *entry, updater);
    }
  }
  return are_usual;
}

// The work of an asynchronous call goes to the store's streams from here.
void LocalStore::enter(
    std::optional<AsyncScope>& scope,
    const Call& call,
    const Entries& entries) const {
  if (!call.options.async_op) {
    return;
  }
  scope.emplace(streams_);
  for (const auto* tensors : {call.values, call.outs}) {
    if (tensors != nullptr) {
      scope->enter(tensors->flat);
    }
  }
  if (call.values != nullptr) {
    scope->enter(merged_tensors(*call.values));
  }
  for (const auto& entry : entries) {
    const std::lock_guard lock(entry->mutex);
    for (const auto& slice : entry->slices) {
      scope->enter(slice.home.device);
    }
  }
}

WorkPtr LocalStore::merge(const Call& call) {
  return apply(call, updater());
}

WorkPtr LocalStore::apply(
    const Call& given,
    const Updater& updater,
    const Tensors* own_outs) {
  std::optional<AsyncScope> scope;
  Entries entries = table_.find(given.op, given.keys);
  const std::optional<Tensors> rows =
      with_rows(given, entries, streams_.runtime);
  Call call = given;
  call.values = rows ? &*rows : given.values;
  const bool are_usual = check(call, entries, updater);
  const CompressionPtr compression = this->compression();
  if (compression != nullptr) {
    check_compressible(call, entries, compression->get(), streams_.runtime);
  }
  check_expected_keys(call.op);
  const bool writes_outs = are_usual && only_cpu_ && compression == nullptr &&
      !has_shared_ && !call.options.async_op &&
      !std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(updater) &&
      can_write_with_sums(call, entries);
  const Tensors* const outs = writes_outs ? call.outs : own_outs;
  Entries of_outs = call.outs == nullptr || writes_outs ? Entries() : entries;
  const Groups values(std::move(entries), *call.values, compression, outs);
  enter(scope, call, values.entries());
  update(values, updater);
  if (!of_outs.empty()) {
    copy_out(Groups(std::move(of_outs), *call.outs));
  }
  return scope ? scope->finish() : nullptr;
}

double LocalStore::measure(const Call& call, const Updater& updater) {
  return optimizer_step_.measure(
      Groups(find(call, updater), *call.values),
      *std::get<OptimizerPtr>(updater));
}

void LocalStore::apply(
    const Call& call,
    const Updater& updater,
    double factor,
    const Tensors* own_outs) {
  optimizer_step_.apply(
      Groups(find(call, updater), *call.values, nullptr, own_outs),
      *std::get<OptimizerPtr>(updater),
      factor);
}

std::pair<at::Tensor, int64_t> LocalStore::lease(const Key& key) {
  const Entries entries = table_.find("lease", key);
  Entry& entry = *entries[0];
  const std::lock_guard lock(entry.mutex);
  return {slices_.lease(entry), entry.version};
}

void LocalStore::update(const Groups& values, const Updater& updater) {
  if (const auto* opaque =
          std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater)) {
    update_one_by_one(values, **opaque);
  } else if (const auto* optimizer = std::get_if<OptimizerPtr>(&updater)) {
    optimizer_step_.push(values, **optimizer);
  } else {
    assign_sums(values);
  }
}

void LocalStore::assign_sums(const Groups& values) {
  for_each_locked(values, [&](size_t begin, size_t end) {
    const Stopwatch watch;
    Batch batch(values, begin, end);
    placement_.place(batch.items, /*may_shard=*/true);
    batch.find_rows();
    batch.compress(slices_);
    for (const auto& item : batch.items) {
      slices_.end_leases(*item.entry);
    }
    const Reducer::Items copied = reducer_.update(batch.items);
    batch.keep_rows();
    batch.count_compressed(batch.items);
    for (const auto& item : batch.items) {
      ++item.entry->version;
    }
    if (values.outs() != nullptr) {
      reducer_.copy_out(copied);
      count_pull(batch.items, 0);
    }
    count_push(batch, &KeyStats::sum_seconds, watch.seconds());
  });
}

// One key at a time, in order, as an opaque updater expects.
void LocalStore::update_one_by_one(
    const Groups& values,
    OpaqueUpdater& opaque) {
  for (size_t i = 0; i < values.entries().size(); ++i) {
    Entry& entry = *values.entries()[i];
    const std::lock_guard lock(entry.mutex);
    const Stopwatch watch;
    double update_seconds = 0;
    Batch batch(values, i, i + 1);
    placement_.place(batch.items, /*may_shard=*/false);
    batch.compress(slices_);
    slices_.end_leases(entry);
    if (opaque.takes_rows() && batch.has_rows_only()) {
      update_seconds = update_rows(batch, opaque);
    } else {
      reducer_.reduce(
          batch.items[0], [&](at::Tensor& input, at::Tensor& stored) {
            batch.count_compressed(batch.items); // also if the updater throws
            const InProgress<Store> updating(this);
            const Stopwatch updater_watch;
            apply_updater(opaque, entry.key, input, stored, entry.is_shared);
            update_seconds = updater_watch.seconds();
          });
    }
    ++entry.version;
    add_seconds(batch.items, &KeyStats::update_seconds, update_seconds);
    count_push(batch, &KeyStats::sum_seconds, watch.seconds() - update_seconds);
  }
}

void LocalStore::erase(const Keys& keys) {
  constexpr auto* op = "delete";
  check_not_empty(op, keys);
  table_.erase(op, keys);
}

int64_t LocalStore::version(const Key& key) {
  const EntryPtr entry = table_.find("version", key)[0];
  const std::lock_guard lock(entry->mutex);
  return entry->version;
}

int64_t LocalStore::num_steps() {
  const OptimizerPtr optimizer = current_optimizer();
  int64_t most = 0;
  for (const auto& entry : table_.entries("num_update")) {
    const std::lock_guard lock(entry->mutex);
    // An applier's store has updates of its callers only.
    if (optimizer == nullptr || entry->generation == optimizer->generation) {
      most = std::max(most, entry->step);
    }
  }
  return most;
}

std::vector<KeyStats> LocalStore::stats(const Keys& keys) {
  return table_.stats("stats", keys);
}

std::vector<Key> LocalStore::keys() const {
  return table_.keys("keys");
}

std::optional<Meta> LocalStore::meta(const char* op, const Key& key) const {
  return table_.meta(op, key);
}

StoreStatus LocalStore::status() const {
  const std::lock_guard lock(updater_mutex_);
  KeyTable::Summary table = table_.summary();
  if (table.is_open && has_row_sparse_) {
    for (const auto& entry : table_.entries("repr")) {
      table.num_bytes +=
          entry->rows == nullptr ? 0 : entry->rows->num_bytes.load();
    }
  }
  return {
      table.is_open,
      table.num_keys,
      table.num_bytes,
      table.kind,
      expected_keys_,
      optimizer_step_.num_skipped(),
      optimizer_step_.grad_norm()};
}

void LocalStore::barrier() {
  table_.check_open("barrier");
}

void LocalStore::close() {
  // Freed after the lock is released: that may wait for the GIL, whose holder
  // may wait for the lock.
  Updater updater;
  std::vector<EntryPtr> entries;
  const std::lock_guard lock(updater_mutex_);
  entries = table_.close();
  updater_.swap(updater);
}

} // namespace torchkv

// The pipeline of the store: parse -> check -> reduce -> update, and pull.
#include "kvstore.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "comm/comm_aten.h"
#include "comm/comm_nccl.h"
#include "core/errors.h"
#include "core/in_progress.h"
#include "core/process.h"
#include "core/text.h"
#include "store/batch.h"
#include "store/check.h"
#include "store/locked_ranges.h"

namespace torchkv {
namespace {

std::unique_ptr<Comm> make_comm(StoreType type, Runtime& runtime) {
  if (type == StoreType::kNccl) {
    return std::make_unique<CommNccl>(runtime);
  }
  if (type == StoreType::kLocal) {
    return std::make_unique<CommAten>(Slices::Policy::kCpu, runtime);
  }
  return std::make_unique<CommAten>(
      Slices::Policy::kCutAll, runtime, Places::environment());
}

using CheckTensor = void (*)(
    const char* op,
    const Key& key,
    const Meta& meta,
    const at::Tensor& tensor);

void check_tensors(
    CheckTensor check,
    const char* op,
    const Keys& keys,
    const Entries& entries,
    const Tensors& tensors) {
  check_count(op, keys, tensors);
  for (int64_t i = 0; i < keys.size(); ++i) {
    for (const auto& tensor : tensors.of(i)) {
      check(op, keys.list[i], entries[i]->meta, tensor);
    }
  }
}

// An optimizer takes floating-point and complex values.
void check_dtypes(
    const char* op,
    const Updater& updater,
    const Entries& entries) {
  if (!std::holds_alternative<OptimizerPtr>(updater)) {
    return;
  }
  for (const auto& entry : entries) {
    check_optimizable(op, entry->key, entry->meta);
  }
}

std::string similar_key(const char* op, const Key& key, const KeyTable& table) {
  std::vector<std::string> names;
  for (const auto& entry : table.entries(op)) {
    if (entry->key.kind() == KeyKind::kStr) {
      names.push_back(entry->key.text());
    }
  }
  return key.kind() == KeyKind::kStr ? did_you_mean(key.text(), names)
                                     : std::string();
}

// Throws UnknownKeyError where one of the keys, which options were set for, is
// not in the table.
void check_known(
    const char* op,
    const KeyTable& table,
    c10::ArrayRef<Key> keys) {
  const auto kind = table.kind();
  for (const auto& key : keys) {
    TORCH_CHECK_TYPE(
        !kind || *kind == key.kind(),
        op,
        ": expected options of ",
        name(*kind),
        " keys, as this store's first init fixed them, but the optimizer has "
        "some of a key of kind ",
        name(key.kind()),
        " ",
        key.context());
    if (!table.contains(op, key)) {
      throw_unknown_option_key(op, key, similar_key(op, key, table));
    }
  }
}

// What a sum or a copy of one key moves while its caller waits. On an
// accelerator nobody does: work is enqueued, and the larger the range, the
// fewer launches and waits it takes. REQUIRES: the entry's mutex.
int64_t moved_bytes(const Entry& entry, size_t num_tensors) {
  if (!entry.device.is_cpu()) {
    return 0;
  }
  return entry.meta.num_elements *
      static_cast<int64_t>(c10::elementSize(entry.meta.dtype)) *
      static_cast<int64_t>(num_tensors + 1);
}

} // namespace

KVStore::KVStore(const std::string& type, Runtime& runtime)
    : type_(parse_store_type(type)),
      comm_(make_comm(type_, runtime)),
      num_forks_(fork_count()),
      comm_streams_(runtime) {}

bool KVStore::is_forked() const {
  return num_forks_ != fork_count();
}

void KVStore::check_usable(const char* op) const {
  TORCH_CHECK(
      !is_forked(),
      op,
      ": expected to be called in the process that made the store, but got a "
      "forked child of it; make a store in the child (or start it by 'spawn')");
  TORCH_CHECK(
      !InProgress<KVStore>::contains(this),
      op,
      ": expected no call of a store from inside its own updater, but got one");
}

Updater KVStore::updater() const {
  const std::lock_guard lock(updater_mutex_);
  return updater_;
}

Entries KVStore::make_entries(
    const char* op,
    const Keys& keys,
    const Tensors& values) const {
  check_count(op, keys, values);
  table_.check_absent(op, keys);
  check_key_kind(op, updater(), keys.list[0].kind());
  for (int64_t i = 0; i < keys.size(); ++i) {
    const auto group = values.of(i);
    TORCH_CHECK_VALUE(
        group.size() == 1,
        op,
        ": expected one tensor, but got a list of ",
        group.size(),
        " ",
        keys.list[i].context());
    check_storable(op, keys.list[i], group[0]);
  }
  Entries entries;
  for (int64_t i = 0; i < keys.size(); ++i) {
    const at::Tensor& value = values.of(i)[0];
    Meta meta{
        c10::SmallVector<int64_t, 4>(value.sizes()),
        value.scalar_type(),
        value.numel()};
    entries.push_back(
        c10::make_intrusive<Entry>(keys.list[i], std::move(meta)));
  }
  return entries;
}

void KVStore::insert(
    const char* op,
    const Entries& entries,
    const Tensors& values) {
  for (size_t i = 0; i < entries.size(); ++i) {
    comm_->store(*entries[i], values.of(static_cast<int64_t>(i))[0]);
  }
  // Held over both, or set_updater could slip in between with an updater for
  // the other kind of keys.
  const std::lock_guard lock(updater_mutex_);
  check_key_kind(op, updater_, entries[0]->key.kind());
  table_.insert(op, entries);
}

void KVStore::init(const Keys& keys, const Tensors& values) {
  constexpr auto* op = "init";
  check_usable(op);
  const Entries entries = make_entries(op, keys, values);
  insert(op, entries, values);
}

void KVStore::broadcast(
    const Keys& keys,
    const Tensors& values,
    const Tensors& outs,
    int64_t /*priority*/) {
  broadcast_in(nullptr, keys, values, outs);
}

WorkPtr KVStore::broadcast_async(
    const Keys& keys,
    const Tensors& values,
    const Tensors& outs,
    int64_t /*priority*/) {
  AsyncScope scope(comm_streams_);
  broadcast_in(&scope, keys, values, outs);
  return scope.finish();
}

void KVStore::broadcast_in(
    AsyncScope* scope,
    const Keys& keys,
    const Tensors& values,
    const Tensors& outs) {
  constexpr auto* op = "broadcast";
  check_usable(op);
  const Entries entries = make_entries(op, keys, values);
  check_tensors(&check_out, op, keys, entries, outs);
  if (scope != nullptr) {
    scope->enter(entries, {&values, &outs});
  }
  insert(op, entries, values);
  copy_out(entries, outs, updater());
}

void KVStore::push(
    const Keys& keys,
    const Tensors& values,
    int64_t /*priority*/) {
  push_in(nullptr, keys, values);
}

WorkPtr KVStore::push_async(
    const Keys& keys,
    const Tensors& values,
    int64_t /*priority*/) {
  AsyncScope scope(comm_streams_);
  push_in(&scope, keys, values);
  return scope.finish();
}

void KVStore::push_in(
    AsyncScope* scope,
    const Keys& keys,
    const Tensors& values) {
  constexpr auto* op = "push";
  check_usable(op);
  Entries entries = table_.find(op, keys);
  check_tensors(&check_value, op, keys, entries, values);
  const Updater updater = this->updater();
  check_dtypes(op, updater, entries);
  check_expected_keys(op);
  const auto merged = merge_repeats(entries, values);
  if (scope != nullptr) {
    scope->enter(entries, {&values});
  }
  reduce_update(entries, merged ? *merged : values, updater);
}

void KVStore::pull(const Keys& keys, const Tensors& outs, int64_t /*priority*/)
    const {
  pull_in(nullptr, keys, outs);
}

WorkPtr KVStore::pull_async(
    const Keys& keys,
    const Tensors& outs,
    int64_t /*priority*/) const {
  AsyncScope scope(comm_streams_);
  pull_in(&scope, keys, outs);
  return scope.finish();
}

void KVStore::pull_in(AsyncScope* scope, const Keys& keys, const Tensors& outs)
    const {
  constexpr auto* op = "pull";
  check_usable(op);
  Entries entries = table_.find(op, keys);
  check_tensors(&check_out, op, keys, entries, outs);
  const auto merged = merge_repeats(entries, outs);
  if (scope != nullptr) {
    scope->enter(entries, {&outs});
  }
  copy_out(entries, merged ? *merged : outs, updater());
}

std::vector<at::Tensor> KVStore::pull(const Keys& keys, int64_t /*priority*/)
    const {
  constexpr auto* op = "pull";
  check_usable(op);
  TORCH_CHECK_VALUE(
      keys.size() != 0, op, ": expected at least one key, but got none");
  Entries entries = table_.find(op, keys);
  Tensors outs;
  for (const auto& entry : entries) {
    outs.append(empty_like(*entry));
    outs.end_group();
  }
  std::vector<at::Tensor> result(outs.flat.begin(), outs.flat.end());
  const auto merged = merge_repeats(entries, outs);
  copy_out(entries, merged ? *merged : outs, updater());
  return result;
}

void KVStore::pushpull(
    const Keys& keys,
    const Tensors& values,
    const Tensors& outs,
    int64_t /*priority*/) {
  pushpull_in(nullptr, keys, values, outs);
}

WorkPtr KVStore::pushpull_async(
    const Keys& keys,
    const Tensors& values,
    const Tensors& outs,
    int64_t /*priority*/) {
  AsyncScope scope(comm_streams_);
  pushpull_in(&scope, keys, values, outs);
  return scope.finish();
}

void KVStore::pushpull_in(
    AsyncScope* scope,
    const Keys& keys,
    const Tensors& values,
    const Tensors& outs) {
  constexpr auto* op = "pushpull";
  check_usable(op);
  Entries entries = table_.find(op, keys);
  check_tensors(&check_value, op, keys, entries, values);
  check_tensors(&check_out, op, keys, entries, outs);
  const Updater updater = this->updater();
  check_dtypes(op, updater, entries);
  check_expected_keys(op);
  Entries distinct = entries;
  const auto merged_values = merge_repeats(distinct, values);
  if (scope != nullptr) {
    scope->enter(distinct, {&values, &outs});
  }
  reduce_update(distinct, merged_values ? *merged_values : values, updater);
  const auto merged_outs = merge_repeats(entries, outs);
  copy_out(entries, merged_outs ? *merged_outs : outs, updater);
}

void KVStore::reduce_update(
    const Entries& entries,
    const Tensors& values,
    const Updater& updater) {
  if (const auto* opaque =
          std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater)) {
    update_one_by_one(entries, values, **opaque);
    return;
  }
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater);
  if (optimizer != nullptr) {
    step(entries, values, **optimizer);
    return;
  }
  const auto num_bytes = [&](size_t i) {
    return moved_bytes(*entries[i], values.of(static_cast<int64_t>(i)).size());
  };
  for_each_locked(entries, num_bytes, [&](size_t begin, size_t end) {
    const Batch batch(*comm_, entries, values, begin, end, /*may_cut=*/true);
    comm_->reduce_update(batch.items);
    for (const auto& item : batch.items) {
      ++item.entry->version;
    }
  });
}

// The steps of an optimizer. Each pass locks for itself: a push of another
// thread to the same keys may come between the norm and the steps.
void KVStore::step(
    const Entries& entries,
    const Tensors& values,
    const Optimizer& optimizer) {
  const GradientSpec& gradient = optimizer.gradient;
  const bool may_cut = is_elementwise(optimizer.groups[0]);
  const auto num_bytes = [&](size_t i) {
    return moved_bytes(*entries[i], values.of(static_cast<int64_t>(i)).size());
  };
  const auto current = [this] {
    const Updater updater = this->updater();
    const auto* newer = std::get_if<OptimizerPtr>(&updater);
    return newer == nullptr ? nullptr : *newer;
  };
  // Of the gradients that make a step now or, where an infinity is looked for,
  // of all.
  bool has_steps = false;
  const auto squared_norm = [&](double clip_value, bool of_all, double scale) {
    double squared = 0;
    for_each_locked(entries, num_bytes, [&](size_t begin, size_t end) {
      Batch batch(*comm_, entries, values, begin, end, may_cut);
      batch.plan(optimizer, current);
      for (auto& step : batch.steps) {
        step.clip_value = clip_value;
      }
      squared += comm_->squared_norm(batch.stepping, scale);
      if (of_all) {
        squared += comm_->squared_norm(batch.accumulating, scale);
      }
      has_steps = has_steps || !batch.stepping.empty();
    });
    return squared;
  };
  struct Norm {
    double scaled = 0;
    double scale = 1;

    double value() const {
      // Of many fp64 gradients, each finite, it may not be.
      return std::isfinite(scaled)
          ? std::min(scaled / scale, std::numeric_limits<double>::max())
          : scaled;
    }
  };
  const auto norm = [&](double clip_value, bool of_all) -> Norm {
    const double squared = squared_norm(clip_value, of_all, 1);
    if (!std::isinf(squared)) {
      return {std::sqrt(squared), 1};
    }
    // fp64 gradients are infinite, or only their squares.
    constexpr double kScale = 0x1p-600;
    return {std::sqrt(squared_norm(clip_value, of_all, kScale)), kScale};
  };
  double last_scale = 1;
  Norm found;
  bool skip = false;
  if (gradient.skip_nonfinite) {
    // Clipping by value would hide an infinity.
    found = norm(0, /*of_all=*/true);
    skip = !std::isfinite(found.scaled);
  }
  if (gradient.max_norm != 0 && !skip) {
    const bool is_found = gradient.skip_nonfinite && gradient.clip_value == 0 &&
        gradient.accumulate == 1;
    found = is_found ? found : norm(gradient.clip_value, /*of_all=*/false);
    // As torch.nn.utils.clip_grad_norm_.
    const double scale =
        gradient.max_norm * found.scale / (found.scaled + 1e-6 * found.scale);
    last_scale = scale < 1 || std::isnan(scale) ? scale : 1;
  }
  if (skip) {
    ++num_skipped_;
  }
  if (has_steps && !skip) {
    grad_norm_ = found.value();
  } else if (!gradient.skip_nonfinite && gradient.max_norm == 0) {
    grad_norm_ = kNoNorm;
  }
  for_each_locked(entries, num_bytes, [&](size_t begin, size_t end) {
    Batch batch(*comm_, entries, values, begin, end, may_cut);
    batch.plan(optimizer, current);
    if (!skip) {
      comm_->accumulate(batch.accumulating);
      for (const auto& item : batch.accumulating) {
        ++item.entry->num_accumulated;
      }
      for (auto& step : batch.steps) {
        step.last_scale = last_scale;
      }
      comm_->reduce_update(batch.stepping);
    }
    for (const auto& item : batch.stepping) {
      item.entry->num_accumulated = 0;
      if (!skip) {
        ++item.entry->step;
        ++item.entry->version;
      }
    }
  });
}

// One key at a time, in order, as an opaque updater expects.
void KVStore::update_one_by_one(
    const Entries& entries,
    const Tensors& values,
    OpaqueUpdater& opaque) {
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    const std::lock_guard lock(entry.mutex);
    const Batch batch(*comm_, entries, values, i, i + 1, /*may_cut=*/false);
    comm_->reduce(batch.items[0], [&](at::Tensor& input, at::Tensor& stored) {
      const InProgress<KVStore> updating(this);
      apply_updater(opaque, entry.key, input, stored);
    });
    ++entry.version;
  }
}

at::Tensor KVStore::empty_like(Entry& entry) const {
  const std::lock_guard lock(entry.mutex);
  return comm_->empty_like(entry);
}

void KVStore::copy_out(
    const Entries& entries,
    const Tensors& outs,
    const Updater& updater) const {
  const bool may_cut = is_elementwise(updater);
  const auto outs_of = [&](size_t i) {
    return outs.of(static_cast<int64_t>(i));
  };
  for_each_locked(
      entries,
      [&](size_t i) { return moved_bytes(*entries[i], outs_of(i).size()); },
      [&](size_t begin, size_t end) {
        c10::SmallVector<Item, 1> items;
        items.reserve(end - begin);
        for (size_t i = begin; i < end; ++i) {
          items.push_back({entries[i].get(), {}, outs_of(i), nullptr});
        }
        comm_->place(items, may_cut);
        comm_->copy_out(items);
      });
}

void KVStore::erase(const Keys& keys) {
  constexpr auto* op = "delete";
  check_usable(op);
  TORCH_CHECK_VALUE(
      keys.size() != 0, op, ": expected at least one key, but got none");
  table_.erase(op, keys);
}

bool KVStore::contains(const Key& key) const {
  constexpr auto* op = "in";
  check_usable(op);
  return table_.contains(op, key);
}

int64_t KVStore::size() const {
  constexpr auto* op = "len";
  check_usable(op);
  return table_.size(op);
}

std::vector<Key> KVStore::keys() const {
  constexpr auto* op = "keys";
  check_usable(op);
  std::vector<Key> result;
  for (const auto& entry : table_.entries(op)) {
    result.push_back(entry->key);
  }
  return result;
}

std::optional<KeyKind> KVStore::key_kind() const {
  check_usable("keys");
  return table_.kind();
}

std::vector<int64_t> KVStore::shape(const Key& key) const {
  constexpr auto* op = "shape";
  check_usable(op);
  const Entries entries = table_.find(op, key); // keeps the entry alive
  const auto& sizes = entries[0]->meta.sizes;
  return {sizes.begin(), sizes.end()};
}

c10::ScalarType KVStore::dtype(const Key& key) const {
  constexpr auto* op = "dtype";
  check_usable(op);
  return table_.find(op, key)[0]->meta.dtype;
}

void KVStore::set_updater(std::shared_ptr<OpaqueUpdater> updater) {
  Updater next;
  if (updater != nullptr) {
    next = std::move(updater);
  }
  replace_updater("set_updater", std::move(next), new_identity());
}

uint64_t KVStore::set_optimizer(
    Optimizer optimizer,
    bool keep_state,
    bool check_keys) {
  constexpr auto* op = "set_optimizer";
  check_usable(op);
  check_optimizer(op, optimizer);
  Keys named;
  if (check_keys) {
    const Updater before = keep_state ? updater() : Updater();
    const auto* known = std::get_if<OptimizerPtr>(&before);
    for (const auto& [key, options] : optimizer.keys) {
      if (known == nullptr || (*known)->keys.count(key) == 0) {
        named.list.push_back(key);
      }
    }
    if (table_.size(op) != 0) {
      check_known(op, table_, named.list);
      named.list.clear();
    }
  }
  const auto set = [&](uint64_t identity) {
    optimizer.identity = identity;
    return std::make_shared<const Optimizer>(std::move(optimizer));
  };
  if (!keep_state) {
    const uint64_t identity = new_identity();
    replace_updater(op, set(identity), identity);
    if (named.size() != 0) {
      expect_keys(named);
    }
    return identity;
  }
  OptimizerPtr next; // the old one is freed after the lock is released
  const std::lock_guard lock(updater_mutex_);
  table_.check_open(op);
  auto* current = std::get_if<OptimizerPtr>(&updater_);
  TORCH_CHECK_VALUE(
      current != nullptr && (*current)->groups[0].id == optimizer.groups[0].id,
      op,
      ": expected the optimizer that is set, with other numbers, but got '",
      name_of(optimizer.groups[0]),
      "' where ",
      current == nullptr
          ? "no optimizer is set"
          : c10::str('\'', name_of((*current)->groups[0]), "' is"));
  const uint64_t identity = (*current)->identity;
  next = set(identity);
  current->swap(next);
  if (named.size() != 0) {
    expected_keys_.insert(
        expected_keys_.end(), named.list.begin(), named.list.end());
    expects_keys_ = true;
  }
  return identity;
}

uint64_t KVStore::set_optimizer(
    const std::string& name,
    const NumbersByName& numbers) {
  constexpr auto* op = "set_optimizer";
  Optimizer optimizer = make_optimizer(op, name, numbers);
  const Updater before = updater();
  const auto* current = std::get_if<OptimizerPtr>(&before);
  const bool keep_state = current != nullptr &&
      std::string_view(name_of((*current)->groups[0])) ==
          name_of(optimizer.groups[0]);
  if (keep_state) {
    const auto& groups = (*current)->groups;
    optimizer.groups.insert(
        optimizer.groups.end(), groups.begin() + 1, groups.end());
    optimizer.keys = (*current)->keys;
  }
  return set_optimizer(std::move(optimizer), keep_state);
}

void KVStore::expect_keys(const Keys& keys) {
  constexpr auto* op = "expect_keys";
  check_usable(op);
  table_.check_open(op);
  const std::lock_guard lock(updater_mutex_);
  expected_keys_.assign(keys.list.begin(), keys.list.end());
  expects_keys_ = !expected_keys_.empty();
}

std::vector<Key> KVStore::expected_keys() const {
  constexpr auto* op = "expected_keys";
  check_usable(op);
  const std::lock_guard lock(updater_mutex_);
  return expected_keys_;
}

void KVStore::check_expected_keys(const char* op) {
  if (!expects_keys_) {
    return;
  }
  const std::lock_guard lock(updater_mutex_);
  check_known(op, table_, expected_keys_);
  expected_keys_.clear();
  expects_keys_ = false;
}

Updater KVStore::current_updater() const {
  constexpr auto* op = "optimizer";
  check_usable(op);
  table_.check_open(op);
  return updater();
}

int64_t KVStore::num_skipped() const {
  constexpr auto* op = "num_skipped";
  check_usable(op);
  table_.check_open(op);
  return num_skipped_;
}

std::optional<double> KVStore::grad_norm() const {
  constexpr auto* op = "grad_norm";
  check_usable(op);
  table_.check_open(op);
  const double norm = grad_norm_;
  return norm == kNoNorm ? std::nullopt : std::optional(norm);
}

void KVStore::replace_updater(const char* op, Updater next, uint64_t identity) {
  check_usable(op);
  std::vector<EntryPtr> entries;
  {
    const std::lock_guard lock(updater_mutex_);
    entries = table_.entries(op);
    if (const auto kind = table_.kind()) {
      check_key_kind(op, next, *kind);
    }
    updater_.swap(next); // the old one is freed after the lock is released
    expected_keys_.clear();
    expects_keys_ = false;
    grad_norm_ = kNoNorm;
  }
  // A key that a call holds keeps its state until its next push: that call may
  // wait for this thread.
  for (const auto& entry : entries) {
    const std::unique_lock lock(entry->mutex, std::try_to_lock);
    if (lock.owns_lock() && entry->optimizer != 0 &&
        entry->optimizer < identity) {
      comm_->clear_state(*entry);
      entry->optimizer = 0;
    }
  }
}

void KVStore::visit_sole_updater(
    c10::function_ref<void(const OpaqueUpdater&)> visit) const {
  if (is_forked()) {
    return;
  }
  const std::lock_guard lock(updater_mutex_);
  const auto* opaque = std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater_);
  if (opaque != nullptr && opaque->use_count() == 1) {
    visit(**opaque);
  }
}

void KVStore::barrier() const {
  constexpr auto* op = "barrier";
  check_usable(op);
  table_.check_open(op);
}

std::string KVStore::repr() const {
  check_usable("repr");
  std::ostringstream out;
  out << "KVStore(type='" << type() << "', ";
  const auto entries = table_.entries_if_open();
  if (!entries) {
    out << "closed)";
    return out.str();
  }
  int64_t num_bytes = 0;
  for (const auto& entry : *entries) {
    num_bytes += entry->meta.num_elements *
        static_cast<int64_t>(c10::elementSize(entry->meta.dtype));
  }
  out << "keys=" << entries->size() << ", bytes=" << num_bytes << ')';
  return out.str();
}

void KVStore::close() {
  if (is_forked()) {
    return; // a `with` of the parent's ends here, too; there is nothing to free
  }
  check_usable("close");
  // Freed after the lock is released: that may wait for the GIL, whose holder
  // may wait for the lock.
  Updater updater;
  std::vector<EntryPtr> entries;
  const std::lock_guard lock(updater_mutex_);
  entries = table_.close();
  updater_.swap(updater);
}

} // namespace torchkv

// The pipeline of the store: parse -> check -> reduce -> update, and pull.
#include "kvstore.h"

#include <cmath>
#include <sstream>
#include <utility>

#include "check.h"
#include "comm/comm_aten.h"
#include "errors.h"
#include "in_progress.h"
#include "process.h"

namespace torchkv {
namespace {

std::unique_ptr<Comm> make_comm(StoreType type, Runtime& runtime) {
  const auto home = type == StoreType::kLocal ? CommAten::Home::kCpu
                                              : CommAten::Home::kDevice;
  return std::make_unique<CommAten>(home, runtime);
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

// Calls `body(begin, end)` for ranges of entries, in order, while it holds
// their mutexes. It waits for a mutex only while it holds none: a range ends
// before an entry that another call holds, and the next one begins by waiting
// for it.
template <class Body>
void for_each_locked(
    const Entries& entries,
    c10::function_ref<int64_t(size_t)> num_bytes,
    Body body) {
  // A range is worth a parallel region, and others do not wait long for its
  // end.
  constexpr size_t kMaxEntries = 4096;
  constexpr int64_t kMaxBytes = int64_t{256} * 1024 * 1024;

  c10::SmallVector<std::unique_lock<std::mutex>, 1> locks;
  for (size_t begin = 0; begin < entries.size();) {
    locks.emplace_back(entries[begin]->mutex);
    int64_t bytes = num_bytes(begin);
    size_t end = begin + 1;
    while (end < entries.size() && end - begin < kMaxEntries &&
           bytes < kMaxBytes) {
      std::unique_lock lock(entries[end]->mutex, std::try_to_lock);
      if (!lock.owns_lock()) {
        break;
      }
      locks.push_back(std::move(lock));
      bytes += num_bytes(end++);
    }
    body(begin, end);
    locks.clear();
    begin = end;
  }
}

using Group = c10::SmallVector<Value, 4>;

void append(Group& group, c10::ArrayRef<at::Tensor> tensors) {
  for (const auto& tensor : tensors) {
    group.push_back({Value::Form::kDense, &tensor});
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

// The items of a range of keys, whose entries are locked.
struct Batch {
  Batch(
      Comm& comm,
      const Entries& entries,
      const Tensors& values,
      size_t begin,
      size_t end)
      : comm_(comm) {
    for (size_t i = begin; i < end; ++i) {
      append(group_, values.of(static_cast<int64_t>(i)));
    }
    const Value* next = group_.begin();
    for (size_t i = begin; i < end; ++i) {
      Entry& entry = *entries[i];
      const auto tensors = values.of(static_cast<int64_t>(i));
      if (!entry.placed) {
        comm.place(entry, tensors);
      }
      items.push_back({&entry, {next, tensors.size()}, {}, nullptr});
      next += tensors.size();
    }
  }

  // Splits the items into those that make a step of the optimizer now and those
  // whose values are kept for a later one.
  void plan(const Optimizer& optimizer) {
    const GradientSpec& gradient = optimizer.gradient;
    steps.reserve(items.size()); // items point to them
    for (Item item : items) {
      Entry& entry = *item.entry;
      if (entry.optimizer != optimizer.identity) {
        comm_.clear_state(entry);
        entry.optimizer = optimizer.identity;
      }
      if (entry.num_accumulated + 1 < gradient.accumulate) {
        accumulating.push_back(item);
        continue;
      }
      RuleStep step;
      step.rule = optimizer.rule_of(entry.key);
      step.step = entry.step + 1;
      step.scale = gradient.rescale_grad;
      step.clip_value = gradient.clip_value;
      steps.push_back(step);
      item.step = &steps.back();
      stepping.push_back(item);
    }
  }

  c10::SmallVector<Item, 1> items;
  std::vector<RuleStep> steps;
  std::vector<Item> stepping;
  std::vector<Item> accumulating;

 private:
  Comm& comm_;
  Group group_;
};

// What a sum or a copy of one key moves.
int64_t moved_bytes(const Entry& entry, size_t num_tensors) {
  return entry.meta.num_elements *
      static_cast<int64_t>(c10::elementSize(entry.meta.dtype)) *
      static_cast<int64_t>(num_tensors + 1);
}

} // namespace

KVStore::KVStore(const std::string& type, Runtime& runtime)
    : type_(parse_store_type(type)),
      comm_(make_comm(type_, runtime)),
      num_forks_(fork_count()) {}

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
  constexpr auto* op = "broadcast";
  check_usable(op);
  const Entries entries = make_entries(op, keys, values);
  check_tensors(&check_out, op, keys, entries, outs);
  insert(op, entries, values);
  copy_out(entries, outs);
}

void KVStore::push(const Keys& keys, Tensors values, int64_t /*priority*/) {
  constexpr auto* op = "push";
  check_usable(op);
  Entries entries = table_.find(op, keys);
  check_tensors(&check_value, op, keys, entries, values);
  const Updater updater = this->updater();
  check_dtypes(op, updater, entries);
  merge_repeats(entries, values);
  reduce_update(entries, values, updater);
}

void KVStore::pull(const Keys& keys, Tensors outs, int64_t /*priority*/) const {
  constexpr auto* op = "pull";
  check_usable(op);
  Entries entries = table_.find(op, keys);
  check_tensors(&check_out, op, keys, entries, outs);
  merge_repeats(entries, outs);
  copy_out(entries, outs);
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
  merge_repeats(entries, outs);
  copy_out(entries, outs);
  return result;
}

void KVStore::pushpull(
    const Keys& keys,
    Tensors values,
    Tensors outs,
    int64_t /*priority*/) {
  constexpr auto* op = "pushpull";
  check_usable(op);
  Entries entries = table_.find(op, keys);
  check_tensors(&check_value, op, keys, entries, values);
  check_tensors(&check_out, op, keys, entries, outs);
  const Updater updater = this->updater();
  check_dtypes(op, updater, entries);
  Entries distinct = entries;
  merge_repeats(distinct, values);
  reduce_update(distinct, values, updater);
  merge_repeats(entries, outs);
  copy_out(entries, outs);
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
    const Batch batch(*comm_, entries, values, begin, end);
    comm_->reduce_update(batch.items);
    for (const auto& item : batch.items) {
      ++item.entry->version;
    }
  });
}

// The steps of an optimizer.
void KVStore::step(
    const Entries& entries,
    const Tensors& values,
    const Optimizer& optimizer) {
  const GradientSpec& gradient = optimizer.gradient;
  const auto num_bytes = [&](size_t i) {
    return moved_bytes(*entries[i], values.of(static_cast<int64_t>(i)).size());
  };
  double last_scale = 1;
  bool skip = false;
  if (optimizer.needs_norm()) {
    const auto squared_norm = [&](double clip_value) {
      double sum = 0;
      for_each_locked(entries, num_bytes, [&](size_t begin, size_t end) {
        Batch batch(*comm_, entries, values, begin, end);
        batch.plan(optimizer);
        for (auto& step : batch.steps) {
          step.clip_value = clip_value;
        }
        sum += comm_->squared_norm(batch.stepping);
      });
      return sum;
    };
    // Clipping by value would hide an infinity.
    skip = gradient.skip_nonfinite && !std::isfinite(squared_norm(0));
    if (gradient.max_norm != 0 && !skip) {
      // As torch.nn.utils.clip_grad_norm_.
      const double norm = std::sqrt(squared_norm(gradient.clip_value));
      const double scale = gradient.max_norm / (norm + 1e-6);
      last_scale = scale < 1 || std::isnan(scale) ? scale : 1;
    }
  }
  if (skip) {
    ++num_skipped_;
  }
  for_each_locked(entries, num_bytes, [&](size_t begin, size_t end) {
    Batch batch(*comm_, entries, values, begin, end);
    batch.plan(optimizer);
    comm_->accumulate(batch.accumulating);
    for (const auto& item : batch.accumulating) {
      ++item.entry->num_accumulated;
    }
    if (!skip) {
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
  Group group;
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    const auto tensors = values.of(static_cast<int64_t>(i));
    group.clear();
    append(group, tensors);
    const std::lock_guard lock(entry.mutex);
    if (!entry.placed) {
      comm_->place(entry, tensors);
    }
    const Item item{&entry, group, {}, nullptr};
    comm_->reduce(item, [&](at::Tensor& input, at::Tensor& stored) {
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

void KVStore::copy_out(const Entries& entries, const Tensors& outs) const {
  const auto outs_of = [&](size_t i) {
    return outs.of(static_cast<int64_t>(i));
  };
  for_each_locked(
      entries,
      [&](size_t i) { return moved_bytes(*entries[i], outs_of(i).size()); },
      [&](size_t begin, size_t end) {
        c10::SmallVector<Item, 1> items;
        for (size_t i = begin; i < end; ++i) {
          Entry& entry = *entries[i];
          if (!entry.placed) {
            comm_->place(entry, outs_of(i));
          }
          items.push_back({&entry, {}, outs_of(i), nullptr});
        }
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
  const auto& sizes = table_.find(op, key)[0]->meta.sizes;
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
  replace_updater("set_updater", std::move(next));
}

uint64_t KVStore::set_optimizer(Optimizer optimizer, bool keep_state) {
  constexpr auto* op = "set_optimizer";
  check_optimizer(op, optimizer);
  const auto set = [&](uint64_t identity) {
    optimizer.identity = identity;
    return std::make_shared<const Optimizer>(std::move(optimizer));
  };
  if (!keep_state) {
    const uint64_t identity = new_identity();
    replace_updater(op, set(identity));
    return identity;
  }
  check_usable(op);
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
  return identity;
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

void KVStore::replace_updater(const char* op, Updater next) {
  check_usable(op);
  const std::lock_guard lock(updater_mutex_);
  table_.check_open(op);
  if (const auto kind = table_.kind()) {
    check_key_kind(op, next, *kind);
  }
  updater_.swap(next); // the old one is freed after the lock is released
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
    store->set_optimizer(*std::move(state.optimizer));
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
  // Both are freed after the lock is released, as in close().
  Updater updater = other.updater();
  std::vector<EntryPtr> replaced;
  {
    const std::lock_guard lock(updater_mutex_);
    if (const auto kind = table_.kind()) {
      check_key_kind(op, updater, *kind);
    }
    replaced = table_.take(op, other.table_);
    updater_.swap(updater);
    num_skipped_ = other.num_skipped_.load();
  }
  other.close();
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

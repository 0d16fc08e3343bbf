// The pipeline of the store: parse -> check -> reduce -> update, and pull.
#include "kvstore.h"

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

// A rule other than ASSIGN takes floating-point and complex values.
void check_dtypes(
    const char* op,
    const Updater& updater,
    const Entries& entries) {
  const auto* rule = std::get_if<RuleSpec>(&updater);
  if (rule == nullptr || rule->id == RuleSpec::Id::kAssign) {
    return;
  }
  for (const auto& entry : entries) {
    check_optimizable(op, entry->key, entry->meta);
  }
}

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
  const auto tensors_of = [&](size_t i) {
    return values.of(static_cast<int64_t>(i));
  };
  if (const auto* rule = std::get_if<RuleSpec>(&updater)) {
    for_each_locked(
        entries,
        [&](size_t i) {
          return moved_bytes(*entries[i], tensors_of(i).size());
        },
        [&](size_t begin, size_t end) {
          apply_rule(*rule, entries, values, begin, end);
        });
    return;
  }
  // One key at a time, in order, as an opaque updater expects.
  auto& opaque = *std::get<std::shared_ptr<OpaqueUpdater>>(updater);
  Group group;
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    group.clear();
    append(group, tensors_of(i));
    const std::lock_guard lock(entry.mutex);
    if (!entry.placed) {
      comm_->place(entry, tensors_of(i));
    }
    comm_->reduce(
        {&entry, group, {}}, [&](at::Tensor& input, at::Tensor& stored) {
          const InProgress<KVStore> updating(this);
          apply_updater(opaque, entry.key, input, stored);
        });
    ++entry.version;
  }
}

void KVStore::apply_rule(
    const RuleSpec& rule,
    const Entries& entries,
    const Tensors& values,
    size_t begin,
    size_t end) {
  Group group;
  for (size_t i = begin; i < end; ++i) {
    append(group, values.of(static_cast<int64_t>(i)));
  }
  c10::SmallVector<Item, 1> items;
  const Value* next = group.begin();
  for (size_t i = begin; i < end; ++i) {
    Entry& entry = *entries[i];
    const auto tensors = values.of(static_cast<int64_t>(i));
    if (!entry.placed) {
      comm_->place(entry, tensors);
    }
    items.push_back({&entry, {next, tensors.size()}, {}});
    next += tensors.size();
  }
  comm_->reduce_update(items, rule);
  for (const auto& item : items) {
    ++item.entry->version;
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
          items.push_back({&entry, {}, outs_of(i)});
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

void KVStore::set_optimizer(const RuleSpec& rule) {
  constexpr auto* op = "set_optimizer";
  check_rule(op, rule);
  replace_updater(op, rule);
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

StoreState KVStore::state() const {
  constexpr auto* op = "save";
  check_usable(op);
  StoreState state;
  state.type = type();
  const auto entries = table_.entries(op);
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
    comm_->copy_out(Item{entry.get(), {}, state.values.back()});
    state.versions.push_back(entry->version);
  }
  const InProgress<KVStore> saving(this);
  if (auto bytes = serialize_updater(updater())) {
    state.updater.push_back(*std::move(bytes));
  }
  return state;
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
    store->replace_updater("load", load_updater(state.updater[0]));
  }
  return store;
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

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
  merge_repeats(entries, values);
  reduce_update(entries, values);
}

void KVStore::pull(const Keys& keys, const Tensors& outs, int64_t /*priority*/)
    const {
  constexpr auto* op = "pull";
  check_usable(op);
  const Entries entries = table_.find(op, keys);
  check_tensors(&check_out, op, keys, entries, outs);
  copy_out(entries, outs);
}

std::vector<at::Tensor> KVStore::pull(const Keys& keys, int64_t /*priority*/)
    const {
  constexpr auto* op = "pull";
  check_usable(op);
  TORCH_CHECK_VALUE(
      keys.size() != 0, op, ": expected at least one key, but got none");
  std::vector<at::Tensor> result;
  for (const auto& entry : table_.find(op, keys)) {
    const std::lock_guard lock(entry->mutex);
    result.push_back(comm_->copy_of(*entry));
  }
  return result;
}

void KVStore::pushpull(
    const Keys& keys,
    Tensors values,
    const Tensors& outs,
    int64_t /*priority*/) {
  constexpr auto* op = "pushpull";
  check_usable(op);
  const Entries in_order = table_.find(op, keys);
  check_tensors(&check_value, op, keys, in_order, values);
  check_tensors(&check_out, op, keys, in_order, outs);
  Entries distinct = in_order;
  merge_repeats(distinct, values);
  reduce_update(distinct, values);
  copy_out(in_order, outs);
}

void KVStore::reduce_update(const Entries& entries, const Tensors& values) {
  const Updater updater = this->updater();
  const auto* rule = std::get_if<RuleSpec>(&updater);
  c10::SmallVector<Value, 8> group;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto tensors = values.of(static_cast<int64_t>(i));
    group.clear();
    for (const auto& tensor : tensors) {
      group.push_back({Value::Form::kDense, &tensor});
    }
    Entry& entry = *entries[i];
    const Item item{&entry, group, {}};
    const std::lock_guard lock(entry.mutex);
    if (!entry.placed) {
      comm_->place(entry, tensors);
    }
    if (rule != nullptr) {
      comm_->reduce_update(item, *rule);
    } else {
      auto& opaque = *std::get<std::shared_ptr<OpaqueUpdater>>(updater);
      comm_->reduce(item, [&](at::Tensor& input, at::Tensor& stored) {
        const InProgress<KVStore> updating(this);
        apply_updater(opaque, entry.key, input, stored);
      });
    }
    ++entry.version;
  }
}

void KVStore::copy_out(const Entries& entries, const Tensors& outs) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    const auto group = outs.of(static_cast<int64_t>(i));
    const Item item{&entry, {}, group};
    const std::lock_guard lock(entry.mutex);
    if (!entry.placed) {
      comm_->place(entry, group);
    }
    comm_->copy_out(item);
  }
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
  constexpr auto* op = "set_updater";
  check_usable(op);
  Updater next;
  if (updater != nullptr) {
    next = std::move(updater);
  }
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
    const std::lock_guard lock(entry->mutex);
    state.values.push_back(comm_->copy_of(*entry));
    state.versions.push_back(entry->version);
  }
  const Updater updater = this->updater();
  if (const auto* opaque =
          std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater)) {
    const InProgress<KVStore> saving(this);
    state.updater.push_back(serialize_updater(**opaque));
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
    store->set_updater(load_updater(state.updater[0]));
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

#include "kvstore.h"

#include <ATen/record_function.h>

#include <utility>

#include "core/errors.h"
#include "core/in_progress.h"
#include "core/process.h"
#include "store/check.h"
#include "store/key_table.h"
#include "store/registry.h"
#include "store/row_erase.h"
#include "store/row_pull.h"
#include "store/row_values.h"
#include "store/store.h"

// The range of a call in torch.profiler.
#define TORCHKV_RANGE(name) \
  RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>())

namespace torchkv {

KVStore::KVStore(const std::string& type, Runtime& runtime)
    : KVStore(type, StoreOptions(), runtime) {}

KVStore::KVStore(
    const std::string& type,
    const StoreOptions& options,
    Runtime& runtime)
    : type_(canonical_type(type)),
      num_forks_(fork_count()),
      store_(make_store(type_, runtime, options)) {}

KVStore::~KVStore() = default;

bool KVStore::is_forked() const {
  return num_forks_ != fork_count();
}

Store* KVStore::store() const {
  return is_forked() ? nullptr : store_.get();
}

Store& KVStore::usable(const char* op) const {
  TORCH_CHECK(
      !is_forked(),
      op,
      ": expected to be called in the process that made the store, but got a "
      "forked child of it; make a store in the child (or start it by 'spawn')");
  TORCH_CHECK(
      !InProgress<Store>::contains(store_.get()),
      op,
      ": unexpected call of a store from inside its own updater");
  return *store_;
}

StoreStatus KVStore::status(const char* op) const {
  StoreStatus status = usable(op).status();
  expect_open(op, status.is_open);
  return status;
}

Updater KVStore::updater(const char* op) const {
  status(op); // which refuses a closed store
  return store_->updater();
}

Meta KVStore::meta(const char* op, const Key& key) const {
  auto meta = usable(op).meta(op, key);
  if (!meta) {
    throw_unknown_key(op, key);
  }
  return *std::move(meta);
}

void KVStore::init(
    const Keys& keys,
    const Tensors& values,
    const CallOptions& options) {
  TORCHKV_RANGE("torchkv::init");
  const Call call{"init", keys, &values, nullptr, options};
  usable(call.op).insert(call);
}

WorkPtr KVStore::push(
    const Keys& keys,
    const Tensors& values,
    const CallOptions& options) {
  TORCHKV_RANGE("torchkv::push");
  const Call call{"push", keys, &values, nullptr, options};
  return usable(call.op).merge(call);
}

WorkPtr KVStore::pull(
    const Keys& keys,
    const Tensors& outs,
    const CallOptions& options) const {
  TORCHKV_RANGE("torchkv::pull");
  const Call call{"pull", keys, nullptr, &outs, options};
  Store& store = usable(call.op);
  const auto dense =
      options.ignore_sparse ? dense_outs(call) : std::optional<DenseOuts>();
  if (!dense) {
    return store.pull(call);
  }
  for (const auto& key : keys.list) {
    meta(call.op, key);
  }
  if (dense->keys.size() != 0) {
    return store.pull({call.op, dense->keys, nullptr, &dense->outs, options});
  }
  return options.async_op
      ? c10::make_intrusive<Work>(
            default_runtime(), Work::Parts(), std::vector<at::Tensor>())
      : nullptr;
}

std::vector<at::Tensor> KVStore::pull(
    const Keys& keys,
    const CallOptions& options) const {
  TORCHKV_RANGE("torchkv::pull");
  return usable("pull").pull(keys, options);
}

void KVStore::row_sparse_pull(
    const Keys& keys,
    const Tensors& row_ids,
    const Tensors& outs) const {
  TORCHKV_RANGE("torchkv::row_sparse_pull");
  constexpr auto* op = "row_sparse_pull";
  pull_rows(usable(op), op, keys, &outs, row_ids);
}

std::vector<at::Tensor> KVStore::row_sparse_pull(
    const Keys& keys,
    const Tensors& row_ids) const {
  TORCHKV_RANGE("torchkv::row_sparse_pull");
  constexpr auto* op = "row_sparse_pull";
  return pull_rows(usable(op), op, keys, nullptr, row_ids);
}

WorkPtr KVStore::pushpull(
    const Keys& keys,
    const Tensors& values,
    const Tensors& outs,
    const CallOptions& options) {
  TORCHKV_RANGE("torchkv::pushpull");
  const Call call{"pushpull", keys, &values, &outs, options};
  return usable(call.op).merge(call);
}

WorkPtr KVStore::broadcast(
    const Keys& keys,
    const Tensors& values,
    const Tensors& outs,
    const CallOptions& options) {
  TORCHKV_RANGE("torchkv::broadcast");
  const Call call{"broadcast", keys, &values, &outs, options};
  return usable(call.op).insert(call);
}

void KVStore::assign(
    const Keys& keys,
    const Tensors& values,
    const CallOptions& options) {
  TORCHKV_RANGE("torchkv::assign");
  const Call call{"assign", keys, &values, nullptr, options};
  usable(call.op).assign(call);
}

void KVStore::init_rows(
    const Key& key,
    const std::vector<int64_t>& row_shape,
    c10::ScalarType dtype,
    std::optional<int64_t> num_rows,
    const RowInit& init) {
  TORCHKV_RANGE("torchkv::init_rows");
  const Where where{"init_rows", key};
  usable(where.op).init_rows(
      key, row_sparse_meta(where, num_rows, row_shape, dtype), init);
}

void KVStore::erase_rows(const Keys& keys, const Tensors& row_ids) {
  TORCHKV_RANGE("torchkv::erase_rows");
  constexpr auto* op = "delete";
  torchkv::erase_rows(usable(op), op, keys, row_ids);
}

void KVStore::erase(const Keys& keys) {
  usable("delete").erase(keys);
}

bool KVStore::contains(const Key& key) const {
  constexpr auto* op = "in";
  return usable(op).meta(op, key).has_value();
}

int64_t KVStore::size() const {
  return status("len").num_keys;
}

std::vector<Key> KVStore::keys() const {
  return usable("keys").keys();
}

std::optional<KeyKind> KVStore::key_kind() const {
  return usable("keys").status().key_kind;
}

std::vector<int64_t> KVStore::shape(const Key& key) const {
  const auto sizes = meta("shape", key).sizes;
  return {sizes.begin(), sizes.end()};
}

bool KVStore::is_row_sparse(const Key& key) const {
  return meta("is_row_sparse", key).is_row_sparse;
}

int64_t KVStore::num_rows(const Key& key) const {
  constexpr auto* op = "num_rows";
  return usable(op).num_rows(op, key);
}

c10::Device KVStore::row_device(const Key& key) const {
  constexpr auto* op = "row_device";
  meta(op, key); // which refuses an unknown one
  return usable(op).row_device(op, key);
}

std::vector<KeyStats> KVStore::stats(const Keys& keys) const {
  return usable("stats").stats(keys);
}

int64_t KVStore::version(const Key& key) const {
  return usable("version").version(key);
}

c10::ScalarType KVStore::dtype(const Key& key) const {
  return meta("dtype", key).dtype;
}

void KVStore::set_updater(std::shared_ptr<OpaqueUpdater> updater) {
  usable("set_updater").set_updater(std::move(updater));
}

uint64_t KVStore::set_optimizer(
    Optimizer optimizer,
    bool keep_state,
    bool check_keys) {
  return usable("set_optimizer")
      .set_optimizer(std::move(optimizer), keep_state, check_keys);
}

uint64_t KVStore::set_optimizer(
    const std::string& name,
    const NumbersByName& numbers) {
  constexpr auto* op = "set_optimizer";
  const Updater before = updater(op);
  Optimizer optimizer = make_optimizer(op, name, numbers);
  const auto* current = std::get_if<OptimizerPtr>(&before);
  const bool keep_state = current != nullptr &&
      std::string_view((*current)->name()) == optimizer.name();
  if (keep_state) {
    const auto& groups = (*current)->groups;
    optimizer.groups.insert(
        optimizer.groups.end(), groups.begin() + 1, groups.end());
    optimizer.keys = (*current)->keys;
  }
  return set_optimizer(std::move(optimizer), keep_state);
}

void KVStore::expect_keys(const Keys& keys) {
  usable("expect_keys").expect_keys(keys);
}

std::vector<Key> KVStore::expected_keys() const {
  return usable("expected_keys").status().expected_keys;
}

Updater KVStore::current_updater() const {
  return updater("optimizer");
}

int64_t KVStore::num_skipped() const {
  return status("num_skipped").num_skipped;
}

std::optional<double> KVStore::grad_norm() const {
  return status("grad_norm").grad_norm;
}

int64_t KVStore::num_steps() const {
  return usable("num_update").num_steps();
}

std::vector<KeyState> KVStore::optimizer_states(const Keys& keys) const {
  return usable("optimizer_states").optimizer_states(keys);
}

void KVStore::set_optimizer_states(
    const Keys& keys,
    const std::vector<KeyState>& states) {
  usable("set_optimizer_states").set_optimizer_states(keys, states);
}

void KVStore::set_gradient_compression(const Compression& compression) {
  usable("set_gradient_compression").set_compression(compression);
}

void KVStore::set_gradient_compression(
    const std::string& type,
    const NumbersByName& numbers) {
  set_gradient_compression(
      Compression{{make_codec("set_gradient_compression", type, numbers)}, {}});
}

Compression KVStore::gradient_compression() const {
  status("gradient_compression"); // which refuses a closed store
  const CompressionPtr compression = store_->compression();
  return compression == nullptr ? Compression() : compression->get();
}

int64_t KVStore::rank() const {
  return store_->rank();
}

int64_t KVStore::num_workers() const {
  return store_->num_workers();
}

int64_t KVStore::num_dead_node() const {
  status("num_dead_node"); // which refuses a closed store
  return store_->num_dead_node();
}

void KVStore::flush() const {
  usable("flush").flush();
}

void KVStore::barrier() const {
  usable("barrier").barrier();
}

std::string KVStore::repr() const {
  const StoreStatus status = usable("repr").status();
  const std::string content = status.is_open
      ? c10::str("keys=", status.num_keys, ", bytes=", status.num_bytes)
      : "closed";
  return c10::str("KVStore(type='", type_, "', ", content, ')');
}

void KVStore::close() {
  if (!is_forked()) { // a `with` of the parent's ends there, too
    usable("close").close();
  }
}

} // namespace torchkv

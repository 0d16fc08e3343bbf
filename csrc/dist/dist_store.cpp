#include "dist_store.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../core/process.h"
#include "../store/check.h"
#include "../store/count_calls.h"
#include "../store/shared_values.h"
#include "capture.h"
#include "errors.h"
#include "store_config.h"
#include "transport/frame.h"

namespace torchkv::dist {
namespace {

// What rank 0 says of the snapshot to begin with.
constexpr int64_t kNoSnapshots = -1;
std::string snapshot_key(const Config& config) {
  return c10::str("snapshot/", config.store);
}

// For a call of which some values are on devices: those of the items named.
Session::Complete completion(HostCopy copy, std::vector<size_t> items) {
  return [copy = std::make_shared<HostCopy>(std::move(copy)),
          items = std::move(items)](Request& request) {
    const auto values = copy->wait();
    for (size_t i = 0; i < items.size(); ++i) {
      request.items[items[i]].value = blob_of(values[i]);
    }
  };
}

} // namespace

DistStore::DistStore(
    const std::string& type,
    const Policy& policy,
    Runtime& runtime,
    const StoreOptions& options)
    : runtime_(runtime),
      num_forks_(fork_count()),
      timeout_(timeout_of(options)),
      is_sync_(policy.is_sync()),
      node_(Node::join(options, environment_launch(options), timeout_)),
      staging_(runtime, node_->memory()),
      snapshots_(options),
      norms_(std::make_shared<NormReport>()),
      name_(options.name) {
  // Checked before the store gets a number: the ranks' stores match by it, so
  // that one which is refused here on one rank only must not count.
  Config config = config_of(*node_, type, policy, options, timeout_);
  TORCH_CHECK_VALUE(
      is_sync_ || options.snapshot_dir.empty(),
      "create: snapshot_dir is for stores of type 'dist_sync'");
  const std::string name = c10::str(type, '/', name_);
  const int64_t number = node_->num_made(stable_hash(name));
  config.store = stable_hash(c10::str(name, '/', number));
  std::unique_ptr<SnapshotFiles> files;
  std::optional<Shard> restored;
  if (!options.snapshot_dir.empty()) {
    files = std::make_unique<SnapshotFiles>(
        options.snapshot_dir, stable_hash(name));
    restored = latest_snapshot(*files, config);
  } else if (is_sync_ && rank() == 0) {
    node_->agree(snapshot_key(config), c10::str(kNoSnapshots)); // who waits
  }
  session_ = std::make_shared<Session>(
      node_,
      config,
      node_->incarnation(),
      node_->server_incarnation(),
      runtime,
      this,
      std::move(files),
      restored ? &*restored : nullptr);
  const std::lock_guard lock(node_->mutex());
  node_->add(config.store, session_);
}

// Rank 0 decides which snapshot it is.
std::optional<Shard> DistStore::latest_snapshot(
    const SnapshotFiles& files,
    const Config& config) const {
  Manifest manifest;
  if (rank() == 0) {
    manifest = files.latest().value_or(Manifest());
  }
  const std::string agreed = node_->agree(
      snapshot_key(config),
      c10::str(manifest.number, ' ', manifest.job, ' ', manifest.num_servers));
  std::istringstream(agreed) >> manifest.number >> manifest.job >>
      manifest.num_servers;
  TORCH_CHECK_VALUE(
      manifest.number != kNoSnapshots,
      "create: expected snapshot_dir on all ranks or on none, but rank 0 has "
      "none");
  TORCH_CHECK_VALUE(
      manifest.number == 0 || manifest.num_servers == config.num_servers,
      "create: expected as many ranks as the snapshot has, ",
      manifest.num_servers,
      ", but got ",
      config.num_servers);
  return manifest.number == 0
      ? std::nullopt
      : std::optional(files.read(manifest, node_->rank(), config.piece_bytes));
}

DistStore::~DistStore() {
  if (num_forks_ != fork_count()) {
    // Its threads and locks are the parent's: leaked.
    // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): a few bytes
    new std::shared_ptr<Session>(std::move(session_));
    // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): likewise
    new std::shared_ptr<Node>(std::move(node_));
    return;
  }
  session_->close(Node::kExitTimeout);
}

// -- calls

// Not in create: ranks may create stores in different orders.
void DistStore::join(const char* op) const {
  session_->join(op, timeout_);
  if (const auto error = session_->fatal()) {
    throw_error(op, *error, rank(), timeout_);
  }
}

PendingPtr DistStore::begin(
    const char* op,
    Request request,
    bool is_watched,
    Session::Complete complete) const {
  join(op);
  return session_->call(
      std::move(request), timeout_, is_watched, std::move(complete));
}

std::vector<PendingPtr> DistStore::begin_all(
    const char* op,
    std::vector<Request> requests) const {
  join(op);
  return session_->call_all(std::move(requests), timeout_);
}

const Return& DistStore::wait(const char* op, Pending& pending) const {
  const Return& result = pending.wait();
  if (result.error) {
    throw_error(op, *result.error, rank(), timeout_);
  }
  return result;
}

std::unique_lock<std::timed_mutex> DistStore::hold(
    const char* op,
    std::timed_mutex& mutex) const {
  return lock_within(mutex, op, rank(), timeout_);
}

void DistStore::run(const char* op, Request request) const {
  wait(op, *begin(op, std::move(request)));
}

void DistStore::raise_deferred(const char* op, const Keys* keys) const {
  if (const auto error = session_->deferred_error(keys)) {
    throw_error(op, *error, rank(), timeout_);
  }
}

KeySpec DistStore::spec_of(const Meta& meta, bool whole) const {
  KeySpec spec;
  spec.total = meta.num_elements;
  spec.dtype = static_cast<int32_t>(meta.dtype);
  spec.item_bytes = static_cast<int32_t>(c10::elementSize(meta.dtype));
  spec.sizes.assign(meta.sizes.begin(), meta.sizes.end());
  const std::lock_guard lock(updater_mutex_);
  spec.whole = whole || !is_elementwise(updater_);
  return spec;
}

void check_fits_messages(
    const char* op,
    const Key& key,
    const at::Tensor& value) {
  const Where where{op, key};
  TORCHKV_CHECK_VALUE(
      key.kind() == KeyKind::kInt || key.text().size() <= kMaxKeyBytes,
      where,
      "expected a key of at most ",
      kMaxKeyBytes,
      " bytes, but got one of ",
      key.text().size());
  TORCHKV_CHECK_VALUE(
      value.dim() <= static_cast<int64_t>(kMaxKeyDims),
      where,
      "expected at most ",
      kMaxKeyDims,
      " dimensions, but got ",
      value.dim());
}

WorkPtr DistStore::insert(const Call& call) {
  refuse_sharing(call);
  check_not_capturing(call, runtime_);
  check_count(call.op, call.keys, *call.values);
  table_.check_absent(call.op, call.keys);
  check_key_kind(call.op, updater(), call.keys.list[0].kind());
  check_one_each(call);
  Entries entries;
  Request request(Request::Kind::kInit);
  for (size_t i = 0; i < call.keys.list.size(); ++i) {
    const Key& key = call.keys.list[i];
    const at::Tensor& value = call.values->flat[i];
    check_fits_messages(call.op, key, value);
    Meta meta{
        c10::SmallVector<int64_t, 4>(value.sizes()),
        value.scalar_type(),
        value.numel()};
    Request::Item item;
    item.key = key;
    item.spec = spec_of(meta, call.options.whole);
    if (rank() == 0) {
      const at::Tensor copy =
          Buffers().empty(value.sizes(), value.scalar_type());
      runtime_.copy(copy, value);
      item.value = blob_of(copy);
    }
    request.items.push_back(std::move(item));
    entries.push_back(c10::make_intrusive<Entry>(key, std::move(meta)));
  }
  check_no_repeats(call.op, entries);
  check_outs(call, entries);
  // Until the servers have answered: one thread of several initializes a key.
  const KeyTable::Reservation reservation(table_, call.op, call.keys);
  std::vector<Key> split;
  for (const auto& item : request.items) {
    const auto places = place(
        item.key,
        item.spec,
        session_->config().num_servers,
        session_->config().split_bytes);
    if (places.size() > 1) {
      split.push_back(item.key);
    }
  }
  run(call.op, std::move(request));
  { // before others find the keys
    const std::lock_guard lock(updater_mutex_);
    split_keys_.insert(split.begin(), split.end());
  }
  table_.insert(call.op, entries);
  return call.outs == nullptr ? nullptr : pull(call);
}

Entries DistStore::find(const Call& call) const {
  check_not_capturing(call, runtime_);
  Entries entries = table_.find(call.op, call.keys);
  check_values(call, entries);
  check_outs(call, entries);
  if (call.values != nullptr &&
      std::holds_alternative<OptimizerPtr>(updater())) {
    for (const auto& entry : entries) {
      check_optimizable(call.op, *entry);
    }
  }
  return entries;
}

WorkPtr DistStore::merge(const Call& call) {
  const Entries entries = find(call);
  check_expected_keys(call.op);
  count_call(call, entries);
  c10::SmallVector<c10::ScalarType, 4> dtypes;
  for (const auto& entry : entries) {
    dtypes.push_back(entry->meta.dtype);
  }
  {
    const std::lock_guard lock(node_->mutex());
    node_->reclaim(); // so that sums are written in place
  }
  const bool pulls = call.outs != nullptr;
  CallerValues::OfCall values(
      session_->applier().callers(), staging_.buffers());
  Request request(pulls ? Request::Kind::kPushPull : Request::Kind::kPush);
  std::vector<at::Tensor> on_devices;
  std::vector<size_t> items_on_devices;
  const Updater updater = this->updater();
  const bool is_waited = pulls || call.options.async_op;
  // Python may hold up an update for as long as it likes.
  const bool in_place = pulls && !call.options.async_op &&
      !std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(updater);
  const auto elsewhere = [&](size_t i) {
    return places_elsewhere(*entries[i]);
  };
  const Staging::InPlace reads{values, elsewhere};
  for (auto& sum : staging_.sum(call, dtypes, in_place ? &reads : nullptr)) {
    Request::Item item;
    item.key = sum.key;
    item.own = std::move(sum.own);
    if (sum.value.device().is_cpu()) {
      const bool is_own = item.own.data() == sum.value.const_data_ptr();
      item.value = is_own ? item.own : blob_of(sum.value);
    } else {
      on_devices.push_back(sum.value);
      items_on_devices.push_back(request.items.size());
    }
    item.dtype = static_cast<int32_t>(sum.value.scalar_type());
    item.item_bytes = static_cast<int32_t>(sum.value.element_size());
    item.priority = call.options.priority;
    request.items.push_back(std::move(item));
  }
  if (const auto* optimizer = std::get_if<OptimizerPtr>(&updater)) {
    const GradientSpec gradient = (*optimizer)->gradient;
    request.two_phase = gradient.max_norm != 0 || gradient.skip_nonfinite;
    request.factor = [gradient, norms = norms_](double squared_norm) {
      return norms->decide(gradient, squared_norm);
    };
    if (!request.two_phase) {
      norms_->clear_norm();
    }
  }
  if (rank() == 0) {
    take_snapshot(snapshots_.due_before(call.keys));
  }
  auto pending = begin(
      call.op,
      std::move(request),
      /*is_watched=*/!is_waited,
      on_devices.empty() ? nullptr
                         : completion(
                               staging_.copy_to_host(std::move(on_devices)),
                               std::move(items_on_devices)));
  if (rank() == 0) {
    take_snapshot(snapshots_.due_after(call.keys));
  }
  if (!is_waited) {
    if (pending->is_finished()) {
      const auto& error = pending->wait().error;
      if (error && error->code == ErrorCode::kUnknown) {
        throw_error(call.op, *error, rank(), timeout_);
      }
    }
    return nullptr;
  }
  WorkPtr work =
      finish(call, std::move(pending), pulls ? outs_of(call, entries) : Outs());
  values.set_merged();
  return work;
}

void DistStore::take_snapshot(std::optional<int64_t> step) {
  if (step) {
    Request request(Request::Kind::kSnapshot);
    request.step = *step;
    snapshots_.begun(begin("push", std::move(request)));
  }
}

WorkPtr DistStore::pull(const Call& call) {
  const Call pulled{call.op, call.keys, nullptr, call.outs, call.options};
  const Entries entries = find(pulled);
  raise_deferred(call.op, &call.keys);
  count_call(pulled, entries);
  Outs outs = outs_of(pulled, entries);
  Request request(Request::Kind::kPull);
  for (const auto& key : outs.keys.list) {
    Request::Item item;
    item.key = key;
    item.priority = call.options.priority;
    item.min_version = call.options.min_version;
    request.items.push_back(std::move(item));
  }
  return finish(pulled, begin(call.op, std::move(request)), std::move(outs));
}

std::vector<at::Tensor> DistStore::pull(
    const Keys& keys,
    const CallOptions& options) {
  constexpr auto* op = "pull";
  check_not_empty(op, keys);
  std::vector<at::Tensor> result;
  for (const auto& entry : table_.find(op, keys)) {
    const PlainDispatch plain;
    result.push_back(
        at::empty(entry->meta.sizes, at::TensorOptions(entry->meta.dtype)));
  }
  const Tensors outs = Tensors::one_each(result);
  pull({op, keys, nullptr, &outs, options});
  return result;
}

void DistStore::erase(const Keys& keys) {
  constexpr auto* op = "delete";
  check_not_empty(op, keys);
  check_no_repeats(op, table_.find(op, keys));
  Request request(Request::Kind::kDelete);
  for (const auto& key : keys.list) {
    Request::Item item;
    item.key = key;
    request.items.push_back(std::move(item));
  }
  run(op, std::move(request));
  table_.erase(op, keys);
  {
    const std::lock_guard lock(updater_mutex_);
    for (const auto& key : keys.list) {
      split_keys_.erase(key);
    }
  }
  staging_.erase(keys);
}

WorkPtr DistStore::finish(const Call& call, PendingPtr pending, Outs outs) {
  auto receipt = std::make_shared<Receipt>(
      runtime_,
      call.op,
      std::move(pending),
      std::move(outs),
      session_,
      rank(),
      timeout_);
  if (call.options.async_op) {
    return c10::make_intrusive<Work>(runtime_, std::move(receipt));
  }
  receipt->wait();
  return nullptr;
}

} // namespace torchkv::dist

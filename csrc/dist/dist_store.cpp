#include "dist_store.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "../core/errors.h"
#include "../core/process.h"
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

std::shared_ptr<Node> join_node(const StoreOptions& given, double timeout) {
  const StoreOptions options = with_default_group(given);
  return Node::join(options, environment_launch(options), timeout);
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
      node_(join_node(options, timeout_)),
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
    began_from_snapshot_ = restored.has_value();
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
double DistStore::join(const char* op) const {
  const Time end = Node::now() + timeout_;
  session_->join(op, timeout_);
  if (const auto error = session_->fatal()) {
    throw_error(op, *error, rank(), timeout_);
  }
  return std::max(end - Node::now(), 0.0);
}

PendingPtr DistStore::begin(
    const char* op,
    Request request,
    bool is_watched,
    Session::Complete complete) const {
  const double left = join(op);
  return session_->call(
      std::move(request), left, is_watched, std::move(complete));
}

std::vector<PendingPtr> DistStore::begin_all(
    const char* op,
    std::vector<Request> requests) const {
  const double left = join(op);
  return session_->call_all(std::move(requests), left);
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
  spec.total = meta.is_row_sparse ? 0 : meta.num_elements;
  spec.dtype = static_cast<int32_t>(meta.dtype);
  spec.item_bytes = static_cast<int32_t>(c10::elementSize(meta.dtype));
  spec.sizes.assign(meta.sizes.begin(), meta.sizes.end());
  if (meta.is_row_sparse) {
    spec.row_init = RowInit();
  }
  const std::lock_guard lock(updater_mutex_);
  spec.whole = whole || needs_whole(updater_, meta.is_row_sparse);
  return spec;
}

void check_fits_messages(const char* op, const Key& key, int64_t num_dims) {
  const Where where{op, key};
  TORCHKV_CHECK_VALUE(
      key.kind() == KeyKind::kInt || key.text().size() <= kMaxKeyBytes,
      where,
      "expected a key of at most ",
      kMaxKeyBytes,
      " bytes, but got one of ",
      key.text().size());
  TORCHKV_CHECK_VALUE(
      num_dims <= static_cast<int64_t>(kMaxKeyDims),
      where,
      "expected at most ",
      kMaxKeyDims,
      " dimensions, but got ",
      num_dims);
}

} // namespace torchkv::dist

// DistStore's updater, what it knows of its keys, and the other ranks.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "../core/errors.h"
#include "../store/check.h"
#include "../store/registry.h"
#include "../update/script_updater.h"
#include "dist_store.h"
#include "errors.h"

namespace torchkv::dist {
namespace {

template <bool is_sync>
std::unique_ptr<Store> make_dist(
    Runtime& runtime,
    const StoreOptions& options) {
  Policy policy;
  if (!is_sync) {
    policy.quorum = 1;
  }
  return std::make_unique<DistStore>(
      is_sync ? "dist_sync" : "dist_async", policy, runtime, options);
}

[[gnu::constructor]] void register_types() {
  register_store("dist_sync", make_dist<true>);
  register_store("dist_async", make_dist<false>);
}

} // namespace

std::vector<Key> DistStore::keys() const {
  return table_.keys("keys");
}

std::optional<Meta> DistStore::meta(const char* op, const Key& key) const {
  return table_.meta(op, key);
}

std::vector<Place> DistStore::places_of(const Entry& entry) const {
  bool is_whole = false;
  {
    const std::lock_guard lock(updater_mutex_);
    is_whole = split_keys_.count(entry.key) == 0;
  }
  return place(
      entry.key,
      spec_of(entry.meta, is_whole),
      session_->config().num_servers,
      session_->config().split_bytes);
}

// On the servers of other ranks.
std::vector<Place> DistStore::places_elsewhere(const Entry& entry) const {
  std::vector<Place> places = places_of(entry);
  places.erase(
      std::remove_if(
          places.begin(),
          places.end(),
          [this](const Place& place) { return place.server == rank(); }),
      places.end());
  return places;
}

bool DistStore::holds(const Key& key) const {
  const std::vector<Place> places = places_of(*table_.find("holds", key)[0]);
  return std::any_of(places.begin(), places.end(), [this](const Place& place) {
    return place.server == rank();
  });
}

int64_t DistStore::version(const Key& key) {
  constexpr auto* op = "version";
  int64_t version = std::numeric_limits<int64_t>::max();
  for (const Place& place : places_of(*table_.find(op, key)[0])) {
    version = std::min(version, session_->version({key, place.index}));
  }
  return version;
}

StoreStatus DistStore::status() const {
  const std::lock_guard lock(updater_mutex_);
  const KeyTable::Summary table = table_.summary();
  return {
      table.is_open,
      table.num_keys,
      table.num_bytes,
      table.kind,
      expected_keys_,
      norms_->num_skipped(),
      norms_->grad_norm()};
}

Updater DistStore::updater() const {
  const std::lock_guard lock(updater_mutex_);
  return updater_;
}

bool DistStore::needs_whole(const Updater& updater, bool is_row_sparse) {
  return is_row_sparse
      ? std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(updater)
      : !is_elementwise(updater);
}

// An updater that needs whole values cannot have keys that are split.
void DistStore::check_updater_fits(const char* op, const Updater& next) const {
  table_.check_open(op);
  if (const auto kind = table_.summary().kind) {
    check_key_kind(op, next, *kind);
  }
  if (is_elementwise(next)) {
    return;
  }
  const std::lock_guard lock(updater_mutex_);
  for (const auto& [key, is_row_sparse] : split_keys_) {
    const Where where{op, key};
    TORCHKV_CHECK_VALUE(
        !needs_whole(next, is_row_sparse),
        where,
        "expected keys that are not sharded over the servers, as this updater "
        "needs whole values; set the updater before init, or use init(..., whole=True)");
  }
}

void DistStore::send_spec(const char* op, const UpdateSpec& spec) {
  if (rank() == 0) {
    Request request(Request::Kind::kConfig);
    request.options = encode(spec);
    // In one message, which holds up all that is sent after it.
    constexpr size_t kMost = size_t{8} << 20U;
    TORCH_CHECK_VALUE(
        request.options.size() <= kMost,
        op,
        ": expected an updater of at most ",
        kMost,
        " bytes, archived, as it is sent in one message, but got ",
        request.options.size(),
        "; keep large tensors in keys of the store");
    auto sent = begin(op, std::move(request), /*is_watched=*/true);
    const std::lock_guard lock(updater_mutex_);
    sent_spec_.swap(sent);
  }
}

int64_t DistStore::epoch() const {
  const std::lock_guard lock(updater_mutex_);
  return spec_.epoch;
}

// Rank 0's word counts; the others know it for their own questions.
void DistStore::set_spec(const char* op, Updater next, bool keep_state) {
  check_updater_fits(op, next);
  UpdateSpec spec;
  bool is_python = false;
  if (const auto* optimizer = std::get_if<OptimizerPtr>(&next)) {
    spec.kind = UpdateSpec::Kind::kOptimizer;
    spec.optimizer = *optimizer;
  } else if (
      const auto* opaque = std::get_if<std::shared_ptr<OpaqueUpdater>>(&next)) {
    is_python = dynamic_cast<const ScriptUpdater*>(opaque->get()) == nullptr;
    spec.kind =
        is_python ? UpdateSpec::Kind::kPython : UpdateSpec::Kind::kScript;
    if (!is_python && rank() == 0) {
      spec.archive = serialize_updater(**opaque);
    }
  }
  const auto setting = hold(op, setting_mutex_);
  if (spec.optimizer != nullptr && compression() != nullptr) {
    check_skips(op, spec.optimizer->gradient);
  }
  {
    const std::lock_guard lock(updater_mutex_);
    spec.epoch = spec_.epoch + (keep_state ? 0 : 1);
    spec.num_calls = spec_.num_calls + 1;
    spec.history = history_after(spec_, spec);
  }
  if (is_python) {
    session_->applier().updates().set_python(
        spec.epoch, std::get<std::shared_ptr<OpaqueUpdater>>(next));
  }
  send_spec(op, spec);
  {
    const std::lock_guard lock(updater_mutex_);
    updater_.swap(next); // the old one is freed after the lock is released
    spec_ = std::move(spec);
    if (!keep_state) {
      expected_keys_.clear();
      norms_->clear_norm();
    }
  }
  if (!is_sync_ && !keep_state) {
    // A push may reach a server before rank 0's word does, or one whose rank
    // has not set its Python updater yet.
    meet(op);
  }
}

void DistStore::set_updater(std::shared_ptr<OpaqueUpdater> updater) {
  Updater next;
  if (updater != nullptr) {
    next = std::move(updater);
  }
  set_spec("set_updater", std::move(next), /*keep_state=*/false);
}

void DistStore::check_gradient(const char* op, const GradientSpec& gradient)
    const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_sync_ || (gradient.max_norm == 0 && !gradient.skip_nonfinite),
      op,
      ": max_norm and skip_nonfinite need the gradients of all ranks, which "
      "dist_async does not wait for; use dist_sync");
}

uint64_t DistStore::set_optimizer(
    Optimizer optimizer,
    bool keep_state,
    bool check_keys) {
  constexpr auto* op = "set_optimizer";
  check_optimizer(op, optimizer);
  check_gradient(op, optimizer.gradient);
  const Updater before = updater();
  const auto* current = std::get_if<OptimizerPtr>(&before);
  TORCH_CHECK_VALUE(
      !keep_state ||
          (current != nullptr &&
           (*current)->groups[0].id == optimizer.groups[0].id),
      op,
      ": expected the optimizer that is set, with other numbers, but got '",
      optimizer.name(),
      "'");
  std::vector<Key> unknown;
  if (check_keys) {
    unknown = unknown_option_keys(
        op, table_, optimizer, keep_state ? current->get() : nullptr);
  }
  optimizer.generation = keep_state ? (*current)->generation : new_generation();
  const uint64_t generation = optimizer.generation;
  set_spec(
      op, std::make_shared<const Optimizer>(std::move(optimizer)), keep_state);
  const std::lock_guard lock(updater_mutex_);
  expected_keys_.insert(expected_keys_.end(), unknown.begin(), unknown.end());
  return generation;
}

void DistStore::expect_keys(const Keys& keys) {
  table_.check_open("expect_keys");
  const std::lock_guard lock(updater_mutex_);
  expected_keys_.assign(keys.list.begin(), keys.list.end());
}

void DistStore::check_expected_keys(const char* op) {
  const std::lock_guard lock(updater_mutex_);
  for (auto* keys : {&expected_keys_, &compression_keys_}) {
    if (!keys->empty()) {
      check_known(op, table_, *keys);
      keys->clear();
    }
  }
}

void DistStore::visit_sole_updater(
    c10::function_ref<void(const OpaqueUpdater&)> /*visit*/) const {}

// So that all servers have the latest updater.
void DistStore::wait_for_spec() {
  PendingPtr spec;
  {
    const std::lock_guard lock(updater_mutex_);
    spec = sent_spec_;
  }
  if (spec != nullptr) {
    spec->wait();
  }
}

// Until this rank's pushes are applied.
void DistStore::settle_own(const char* op) {
  table_.check_open(op);
  session_->join(op, timeout_);
  wait_for_spec();
  session_->flush();
  raise_deferred(op, nullptr);
}

// Waits for all ranks, then for this one's pushes.
void DistStore::meet(const char* op) {
  table_.check_open(op);
  raise_deferred(op, nullptr);
  const auto barriers = hold(op, barrier_mutex_);
  wait_for_spec();
  run(op, Request(Request::Kind::kBarrier));
  // All ranks have pushed equally often, so pushes end, perhaps with an error.
  session_->flush();
  forget_updaters();
  raise_deferred(op, nullptr);
}

// After a barrier, no push has an updater that was replaced before it. In
// dist_async, one of another thread of another rank may still be on its way.
void DistStore::forget_updaters() {
  const int64_t own = epoch();
  const int64_t latest =
      std::min(own, decode_update_spec(session_->options()).epoch);
  session_->applier().forget_python(
      is_sync_ ? latest : std::exchange(settled_epoch_, latest));
}

void DistStore::barrier() {
  constexpr auto* op = "barrier";
  UpdateSpec own;
  {
    const std::lock_guard lock(updater_mutex_);
    own = spec_;
  }
  meet(op);
  check_same_updates(op, own);
}

// Ranks may leave hyperparameters to rank 0, or set them as rank 0 does: one
// that has set others trains with others than it asked for. Rank 0 may be
// ahead; then it cannot be told.
void DistStore::check_same_updates(const char* op, const UpdateSpec& own) {
  if (rank() == 0 || own.num_calls == 0) {
    return;
  }
  const UpdateSpec latest = decode_update_spec(session_->options());
  if (latest.num_calls > own.num_calls ||
      (latest.num_calls == own.num_calls && latest.history == own.history)) {
    return;
  }
  {
    const std::lock_guard lock(updater_mutex_);
    spec_.num_calls += latest.num_calls - own.num_calls;
    spec_.history = latest.history; // an error once
  }
  TORCH_CHECK_VALUE(
      false,
      op,
      ": expected the updater and hyperparameters that rank 0 has set, which "
      "count for all ranks, but rank ",
      rank(),
      latest.num_calls == own.num_calls ? " has set others"
                                        : " has set some that rank 0 has not");
}

void DistStore::close() {
  {
    const auto calls = hold("close", gather_mutex_);
    table_.close();
    if (exchange_ != nullptr) {
      exchange_->close();
    }
  }
  session_->close(Node::kExitTimeout);
  {
    const std::lock_guard lock(updater_mutex_);
    updater_ = Updater();
  }
  session_->flush();
  raise_deferred("close", nullptr);
}

int64_t DistStore::rank() const {
  return node_->rank();
}

int64_t DistStore::num_workers() const {
  return node_->num_ranks();
}

int64_t DistStore::num_dead_node() const {
  return static_cast<int64_t>(session_->lost_ranks().size());
}

} // namespace torchkv::dist

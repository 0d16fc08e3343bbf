// What the ranks of a DistStore tell each other when a store is saved or
// loaded.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../update/script_archives.h"
#include "../update/script_updater.h"
#include "dist_store.h"
#include "errors.h"
#include "gather_round.h"

namespace torchkv::dist {
namespace {

constexpr auto* kGather = "save";

} // namespace

// A store for bytes, of the same ranks.
std::unique_ptr<DistStore> DistStore::make_exchange(int64_t number) const {
  StoreOptions options;
  options.name = c10::str("#exchange/", session_->config().store, '/', number);
  options.rank = rank();
  options.world_size = num_workers();
  options.rendezvous = node_->rendezvous();
  options.security = node_->security();
  options.timeout = timeout_;
  options.heartbeat = session_->config().heartbeat;
  Policy policy;
  policy.quorum = 1;
  return std::make_unique<DistStore>("dist_async", policy, runtime_, options);
}

// The next round of `op`, whose stages are the same on all ranks.
std::unique_ptr<GatherRound> DistStore::begin_round(
    const char* op,
    GatherStage stage,
    int64_t num_bytes) const {
  return std::make_unique<GatherRound>(
      op,
      node_->rendezvous(),
      c10::str(node_->prefix(), "gather/", session_->config().store, '/'),
      GatherRound::Ranks{
          static_cast<int32_t>(rank()),
          static_cast<int32_t>(num_workers()),
          timeout_},
      GatherRound::Contribution{
          static_cast<int64_t>(stage), num_bytes, exchange_ != nullptr},
      [this, op] { check_all_present(op); });
}

// Until the pushes of all ranks are applied. Not by a barrier: after one that
// some ranks have left with an error, the next may let a rank pass early.
void DistStore::begin_gather(const char* op) {
  settle_own(op);
  begin_round(op, GatherStage::kBegin, 0);
}

// Each rank's bytes, on rank 0 or on all. A gathering that fails on one rank
// may have succeeded on another: the next one begins with a new store on all.
std::vector<at::Tensor> DistStore::gather(
    const char* op,
    GatherStage stage,
    const at::Tensor& bytes,
    bool to_all) {
  const auto round = begin_round(op, stage, bytes.numel());
  const auto& ranks = round->contributions();
  std::unique_ptr<DistStore> store = std::move(exchange_);
  if (!std::all_of(ranks.begin(), ranks.end(), [](const auto& each) {
        return each.has_store;
      })) {
    store = make_exchange(round->number());
  }
  Keys keys;
  keys.single = false;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const Key key(static_cast<int64_t>(i));
    const Tensors empty(at::empty({ranks[i].num_bytes}, at::kByte));
    store->insert({op, key, &empty});
    keys.list.push_back(key);
  }
  const Tensors own(bytes);
  store->merge({op, Key(rank()), &own});
  store->session_->flush();
  round->meet();
  std::vector<at::Tensor> result;
  for (const Key& key : keys.list) {
    if (to_all || rank() == 0) {
      result.push_back(store->pull(key, {})[0]);
    }
  }
  store->erase(keys);
  exchange_ = std::move(store);
  return result;
}

// Those that are lost do not answer.
void DistStore::check_all_present(const char* op) const {
  if (const auto error = session_->fatal()) {
    throw_error(op, *error, rank(), timeout_);
  }
  const auto lost = session_->lost_ranks();
  if (!lost.empty()) {
    Error error;
    error.code = ErrorCode::kServerLost;
    error.who = lost[0];
    throw_error(op, error, rank(), timeout_);
  }
}

// The servers' copies of a TorchScript updater, each with a state of its own;
// on rank 0.
std::vector<at::Tensor> DistStore::gather_scripts() {
  const int64_t epoch = this->epoch();
  const auto script = session_->applier().script(kGather, epoch, timeout_);
  auto archives = gather(
      kGather,
      GatherStage::kScripts,
      script != nullptr ? serialize_updater(*script)
                        : at::empty({0}, at::kByte),
      /*to_all=*/false);
  if (archives.empty()) {
    return {};
  }
  // As it was set, where no key of the server has been updated.
  at::Tensor set;
  {
    const std::lock_guard lock(updater_mutex_);
    set = spec_.archive;
  }
  const at::Tensor first = ScriptUpdater::load(set)->serialize();
  for (auto& archive : archives) {
    if (archive.numel() == 0) {
      archive = first;
    }
  }
  return {pack_archives(archives)};
}

// This rank's copy of a saved TorchScript updater. All ranks refuse what one
// cannot load.
std::shared_ptr<OpaqueUpdater> DistStore::own_script(
    const char* op,
    const at::Tensor& bytes) const {
  const auto archives = unpack_archives(bytes);
  TORCH_CHECK_VALUE(
      archives.size() == 1 ||
          archives.size() == static_cast<size_t>(num_workers()),
      op,
      ": expected as many ranks as have saved the store, ",
      archives.size(),
      ", but got ",
      num_workers(),
      ": the updater has a state of its own on each");
  std::vector<std::shared_ptr<OpaqueUpdater>> scripts;
  scripts.reserve(archives.size());
  for (const auto& archive : archives) {
    try {
      scripts.push_back(ScriptUpdater::load(archive));
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(
          false,
          op,
          ": expected an updater that TorchScript can read, but got bytes that "
          "it refuses: ",
          error.what_without_backtrace());
    }
  }
  return scripts[scripts.size() == 1 ? 0 : static_cast<size_t>(rank())];
}

} // namespace torchkv::dist

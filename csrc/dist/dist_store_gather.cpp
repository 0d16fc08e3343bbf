// How the ranks of a DistStore tell each other what they save, and whether they
// can load.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "../core/plain_dispatch.h"
#include "dist_store.h"
#include "errors.h"
#include "gather_round.h"
#include "held_parts.h"

namespace torchkv::dist {
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

std::string DistStore::gather_prefix() const {
  return c10::str(node_->prefix(), "gather/", session_->config().store, '/');
}

// The next round of `op`, whose stages are the same on all ranks.
std::unique_ptr<GatherRound> DistStore::begin_round(
    const char* op,
    int64_t stage,
    int64_t num_bytes) {
  auto round = std::make_unique<GatherRound>(
      op,
      node_->rendezvous(),
      gather_prefix(),
      GatherRound::Ranks{
          static_cast<int32_t>(rank()),
          static_cast<int32_t>(num_workers()),
          timeout_},
      GatherRound::Contribution{stage, num_bytes, exchange_ != nullptr},
      [this, op, stage] {
        check_all_present(op);
        if (stage != kBegin) {
          check_none_failed(op);
        }
      });
  last_round_ = round->number();
  return round;
}

// Until the pushes of all ranks are applied. Not by a barrier: after one that
// some ranks have left with an error, the next may let a rank pass early.
void DistStore::begin_rounds(const char* op) {
  settle_own(op);
  begin_round(op, kBegin, 0);
}

void DistStore::begin_gather(const char* op) {
  const auto calls = hold(op, gather_mutex_);
  begin_rounds(op);
}

std::vector<at::Tensor> DistStore::gather(
    const char* op,
    int64_t stage,
    const at::Tensor& bytes,
    bool to_all) {
  const auto calls = hold(op, gather_mutex_);
  return exchanged(op, kFirstOfCallers + stage, bytes, to_all);
}

// The checks of a call of all ranks, before it changes anything: if they fail
// on one rank, the call fails on all. Then the pushes of all ranks are applied.
void DistStore::check_together(
    const char* op,
    c10::function_ref<void()> check) {
  const auto calls = hold(op, gather_mutex_);
  guarded([&] {
    begin_rounds(op);
    check();
    begin_round(op, kChecked, 0);
  });
}

// Of an error of this rank, unless it is another rank's.
void DistStore::tell_others(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const RemoteError&) {
    return;
  } catch (const std::exception& own) {
    fail_gather(describe(own));
  }
}

// The ranks that are in the same round, or in the next one, hear of it.
void DistStore::fail_gather(const std::string& text) {
  try {
    node_->rendezvous()->set(
        gather_prefix() + "failed",
        c10::str(last_round_, ' ', rank(), ' ', text));
  } catch (const std::exception& error) {
    TORCH_WARN(
        "torchkv: the other ranks wait until they time out: ", describe(error));
  }
}

void DistStore::check_none_failed(const char* op) const {
  const auto failed = node_->rendezvous()->get(gather_prefix() + "failed", 0);
  if (!failed) {
    return;
  }
  std::istringstream text(*failed);
  int64_t round = 0;
  int64_t who = 0;
  text >> round >> who;
  if (round == last_round_ && who != rank()) {
    text.ignore();
    std::ostringstream rest;
    rest << text.rdbuf();
    throw RemoteError(
        {__func__, __FILE__, __LINE__},
        c10::str(op, ": rank ", who, " has failed: ", rest.str()));
  }
}

// Each rank's bytes, on rank 0 or on all. A gathering that fails on one rank
// may have succeeded on another: the next one begins with a new store on all.
std::vector<at::Tensor> DistStore::exchanged(
    const char* op,
    int64_t stage,
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
  const PlainDispatch plain;
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

} // namespace torchkv::dist

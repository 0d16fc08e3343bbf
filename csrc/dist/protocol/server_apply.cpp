// The work on a round, from its first action to its effects.
#include <algorithm>
#include <utility>

#include "server.h"

namespace torchkv::dist {

void Server::apply(Slice& slice) {
  Round& round = *slice.busy;
  slice.applying = true;
  if (round.target) {
    round.shots = shots_of(slice.id, round.target);
    round.target->kid = slice.kid;
    round.target->version = round.version;
  }
  act(Apply{slice.busy});
}

void Server::on_measured(const RoundPtr& round, Time now) {
  now_ = now;
  if (!round) {
    return;
  }
  round->measured = true;
  const SlicePtr slice = find(round->slice);
  if (slice && slice->busy == round && !fatal_) {
    answer_norms(*slice);
  }
  check_closed();
}

// The updater may have thrown: the round counts all the same, and the value is
// what it left.
void Server::on_applied(
    const RoundPtr& round,
    const std::optional<std::string>& error,
    Time now) {
  now_ = now;
  if (round && !round->apart.empty()) {
    on_list_applied(round, error, now);
    return;
  }
  const SlicePtr slice = round ? find(round->slice) : nullptr;
  if (!slice || slice->busy != round || !slice->applying) {
    return;
  }
  if (round->parts && (error || !round->errors.empty())) {
    on_list_applied(round, error, now);
    return;
  }
  slice->busy = nullptr;
  slice->applying = false;
  ++slice->version;
  if (config().leases) {
    slice->current = static_cast<size_t>(round->slot);
  } else {
    auto& value = slice->slots[0];
    value = round->result ? round->result : round->source;
    value->kid = slice->kid;
    value->version = slice->version;
  }
  for (const auto& push : round->pushes) {
    auto* member = slice->members.find(push.rank);
    if (member && push.inc == peer(push.rank).inc) {
      ++member->applied; // not the heir's of one that was lost meanwhile
    }
  }
  reached_snapshots(slice);
  if (error) {
    auto& pulls = slice->pulls;
    pulls.erase(
        std::remove_if(
            pulls.begin(),
            pulls.end(),
            [&](const auto& pull) {
              const auto& pushes = round->pushes;
              return std::any_of(
                  pushes.begin(), pushes.end(), [&](const auto& push) {
                    return push.number == pull.operation->number;
                  });
            }),
        pulls.end());
  }
  for (const auto& push : round->pushes) {
    const auto found = open_.find(push.number);
    if (found == open_.end()) {
      continue;
    }
    const OperationPtr& op = found->second;
    if (error) {
      reply_error(op, {ErrorCode::kUpdater, -1, slice->id, *error, {}});
    } else if (push.kind == Kind::kPush) {
      Reply done;
      done.version = slice->version;
      done.age = slice->version - 1 - push.base;
      reply(op, std::move(done));
    }
  }
  if (slice->dying) {
    free_slice(slice, now);
    check_barriers();
  } else {
    advance(slice, now);
  }
  check_closed();
}

// Steps in two phases: rank 0's worker asks for the norms, and then tells the
// factor.
void Server::do_norm(const OperationPtr& op) {
  const SlicePtr slice = find(op->slice);
  const auto* member = slice ? slice->members.find(op->rank) : nullptr;
  if (!member || !member->attached) {
    reject(op, ErrorCode::kUnknown);
    return;
  }
  slice->norms.push_back(op);
  answer_norms(*slice);
}

void Server::answer_norms(Slice& slice) {
  const auto& round = slice.busy;
  if (!round || !round->measured) {
    return;
  }
  auto norms = std::exchange(slice.norms, {});
  for (const auto& op : norms) {
    if (op->round != round->number) {
      slice.norms.push_back(op);
      continue;
    }
    Reply done;
    done.partial = round->partial;
    reply(op, std::move(done));
  }
}

void Server::do_factor(const OperationPtr& op) {
  const SlicePtr slice = find(op->slice);
  if (!slice || !slice->busy || !slice->busy->measured || slice->applying ||
      slice->busy->number != op->round) {
    reject(op, ErrorCode::kUnknown);
    return;
  }
  slice->busy->factor = op->factor;
  reply_done(op);
  apply(*slice);
}

} // namespace torchkv::dist

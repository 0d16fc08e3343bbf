// Rounds: which pushes make an update, and what is answered when.
#include <algorithm>
#include <utility>

#include "server.h"

namespace torchkv::dist {

// Takes the next step of a slice, if there is one.
void Server::advance(const SlicePtr& slice, Time now) {
  if (!slice->busy && !fatal_) {
    answer_pulls(slice, now); // between updates
    const bool has_slot = slice->leases[0].empty() || slice->leases[1].empty();
    if (!slice->busy && has_slot) {
      const Take take = close_round(*slice, now);
      if (!take.empty()) {
        begin_round(slice, take, now);
      }
    }
  }
  if (sync_ && !slice->pending.empty() &&
      slice->members.size() < peers_.size()) {
    int32_t lacking = 0;
    while (slice->members.contains(lacking)) {
      ++lacking;
    }
    // It has closed, or deleted the key, too early.
    fail({ErrorCode::kLeft, lacking, slice->first_id(), {}, {}});
  }
  check_barriers();
}

// The ranks whose first waiting pushes make the next update; none: not yet.
Server::Take Server::close_round(Slice& slice, Time now) {
  const Policy& policy = config().policy;
  Take ready;
  if (sync_ && slice.pending.num_ranks() < peers_.size()) {
    return {};
  }
  for (const auto* push = slice.pending.first_from(0); push != nullptr;
       push = slice.pending.first_from(push->rank + 1)) {
    if (is_admitted(slice, *push)) {
      ready.push_back(push->rank);
      if (one_is_enough()) {
        return ready;
      }
    }
  }
  if (sync_) {
    return ready.size() == peers_.size() ? ready : Take();
  }
  if (ready.empty()) {
    slice.first_at = slice.quorum_at = std::nullopt;
    return {};
  }
  size_t able = 0; // members that push, or may before long
  for (const auto& [rank, member] : slice.members) {
    able += slice.pending.has(rank) || !is_idle(rank) ? 1 : 0;
  }
  if (ready.size() < able) {
    if (!slice.first_at) {
      slice.first_at = now;
      act(Wake{now + policy.patience});
    }
    const auto quorum =
        static_cast<size_t>(std::max(policy.quorum.value_or(0), 0));
    if (ready.size() < std::min(quorum, able)) {
      slice.quorum_at.reset(); // also if one that made it up is lost
    } else if (!slice.quorum_at) {
      slice.quorum_at = now;
      act(Wake{now + policy.grace});
    }
    if (now < slice.first_at.value_or(now) + policy.patience &&
        (!slice.quorum_at || now < *slice.quorum_at + policy.grace)) {
      return {};
    }
  }
  slice.waited = now - slice.first_at.value_or(now);
  slice.first_at = slice.quorum_at = std::nullopt;
  return ready;
}

// REQUIRES: the rank's first push that is pending.
bool Server::is_admitted(const Slice& slice, const Operation& push) const {
  const auto* member = slice.members.find(push.rank);
  if (!member) {
    return false;
  }
  if (push.gen > options_.rbegin()->first && is_member(peer(0))) {
    return false; // rank 0's change of options is still under way
  }
  return is_within(slice, push.rank, member->applied);
}

// Whether the staleness bound admits it. Who came back has skipped some pushes:
// to bind it slice by slice could be a deadlock.
bool Server::is_within(const Slice& slice, int32_t rank, int64_t clock) const {
  const auto& bound = config().policy.staleness;
  return !bound || peer(rank).inc > 1 || clock - slowest(slice) <= *bound;
}

// Who waits in a barrier cannot push, and holds nobody up: that would be a
// deadlock.
int64_t Server::slowest(const Slice& slice) const {
  std::optional<int64_t> least;
  int64_t most = 0;
  for (const auto& [rank, member] : slice.members) {
    most = std::max(most, member.applied);
    if (!is_idle(rank) && peer(rank).inc <= 1) {
      least = std::min(least.value_or(member.applied), member.applied);
    }
  }
  return least.value_or(most);
}

bool Server::is_idle(int32_t rank) const {
  const auto& entered = peer(rank).entered;
  return entered && entered->phase >= phase_;
}

// From here to on_applied nothing else touches the slice.
void Server::begin_round(const SlicePtr& slice, const Take& take, Time now) {
  auto round = std::make_shared<Round>();
  round->pushes.reserve(take.size());
  for (const int32_t rank : take) {
    const OperationPtr op = slice->pending.pop(rank);
    Push& push = round->pushes.emplace_back();
    push.rank = op->rank;
    push.inc = op->inc;
    push.opno = op->opno;
    push.round = op->round;
    push.base = op->base;
    push.gen = op->gen;
    push.snap = op->snap;
    push.group = op->group;
    push.kind = op->kind;
    push.is_encoded = op->is_encoded;
    push.dtype = op->dtype;
    push.item_bytes = op->item_bytes;
    push.pieces = std::move(op->pieces);
    push.region = op->region;
    push.number = op->number;
  }
  const auto& pushes = round->pushes;
  int64_t gen = 0;
  for (const auto& push : pushes) {
    if (!(push.group == pushes[0].group)) {
      fail({ErrorCode::kGroup, push.rank, slice->id, {}, {}});
      return;
    }
    gen = std::max(gen, push.gen);
  }
  if (pushes[0].rank == 0) {
    capture(*slice, pushes[0].snap); // this push comes after that snapshot
    gen = pushes[0].gen;
  }
  slice->gen = std::max(slice->gen, gen);
  const auto at_least = options_.lower_bound(slice->gen);
  round->slice = slice->id;
  round->spec = slice->spec;
  round->parts = slice->round_parts;
  round->num_elements = slice->num_elements;
  round->kid = slice->kid;
  round->version = slice->version + 1;
  round->number = pushes[0].round;
  round->gen = slice->gen;
  round->options =
      at_least == options_.end() ? options_.rbegin()->second : at_least->second;
  round->group = pushes[0].group;
  round->waited = slice->waited;
  round->begun = now;
  auto& value = slice->slots.at(slice->current);
  round->in_snapshot = !shots_of(slice->id, value).empty();
  if (config().leases) {
    const size_t slot = free_slot(*slice);
    round->source = value;
    round->target = slice->slots.at(slot);
    round->slot = static_cast<int32_t>(slot);
  } else {
    round->source = std::move(value);
    value = nullptr;
  }
  slice->busy = round;
  if (round->group) {
    act(Measure{round});
  } else {
    apply(*slice);
  }
}

// The slot to write to: this version's, if nobody reads it. A lease is waited
// for; what only a snapshot reads is copied, since the snapshot may wait for a
// push that waits for this update.
size_t Server::free_slot(const Slice& slice) const {
  const size_t current = slice.current;
  const size_t other = 1 - current;
  if (!slice.leases.at(current).empty()) {
    return other;
  }
  if (!slice.leases.at(other).empty()) {
    return current;
  }
  return shots_of(slice.id, slice.slots.at(other)).size() <
          shots_of(slice.id, slice.slots.at(current)).size()
      ? other
      : current;
}

// What snapshots hold of this value.
std::vector<std::shared_ptr<Shot>> Server::shots_of(
    const SliceId& id,
    const ValuePtr& value) const {
  std::vector<std::shared_ptr<Shot>> result;
  for (const auto& [number, shots] : captures_) {
    const auto* shot = shots.find(id);
    if (shot && (*shot)->value == value) {
      result.push_back(*shot);
    }
  }
  return result;
}

void Server::answer_pulls(const SlicePtr& slice, Time now) {
  if (slice->pulls.empty()) {
    return;
  }
  std::vector<int32_t> leaving;
  auto& pulls = slice->pulls; // which keeps its memory
  size_t num_left = 0;
  for (size_t i = 0; i < pulls.size(); ++i) {
    const Slice::Pull pull = std::move(pulls[i]);
    const OperationPtr& op = pull.operation;
    if (!may_read(*slice, pull)) {
      pulls[num_left++] = pull;
      continue;
    }
    if (op->kind == Kind::kDelete) {
      capture(*slice, op->rank == 0 ? op->snap : 0);
      reply_done(op);
      leaving.push_back(op->rank);
      continue;
    }
    const ValuePtr& value = slice->slots.at(slice->current);
    const bool is_query = op->kind == Kind::kPull && op->num_pieces != 0;
    const ValuePtr part =
        is_query ? select(*slice, *value, op->pieces) : nullptr;
    if (is_query && !part) {
      reply_error(op, {ErrorCode::kShape, op->rank, slice->id, {}, {}});
      continue;
    }
    Reply found;
    found.kind = Kind::kValue;
    found.version = slice->version;
    found.kid = slice->kid;
    found.round = pull.need;
    if (is_query) {
      found.value = part;
    } else if (!config().leases) {
      found.value = value;
    } else {
      found.lease = value->region.value_or(Region());
      if (open_.count(op->number) != 0) {
        peer(op->rank).leases[op->opno] = {slice, slice->current};
        slice->leases.at(slice->current).insert({op->rank, op->inc, op->opno});
      }
    }
    reply(op, std::move(found));
  }
  pulls.resize(num_left);
  for (const int32_t rank : leaving) {
    detach(slice, rank, now, true);
  }
}

ValuePtr Server::select(
    const Slice& slice,
    const Value& value,
    const Blobs& query) const {
  return select_ ? select_(slice.id, *slice.spec, value, query) : nullptr;
}

bool Server::may_read(const Slice& slice, const Slice::Pull& pull) const {
  const Operation& op = *pull.operation;
  const auto* member = slice.members.find(op.rank);
  if (!member || member->applied < pull.need ||
      slice.version < op.min_version) {
    return false;
  }
  return op.kind == Kind::kDelete || is_within(slice, op.rank, pull.need);
}

} // namespace torchkv::dist

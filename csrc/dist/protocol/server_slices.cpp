// Slices: how they come and go, who are their members, pushes and pulls.
#include <algorithm>
#include <utility>

#include "server.h"

namespace torchkv::dist {

// Whether the rank's delete waits for its pushes.
bool Server::is_leaving(const Slice& slice, int32_t rank) {
  return std::any_of(
      slice.pulls.begin(), slice.pulls.end(), [&](const auto& pull) {
        return pull.operation->rank == rank &&
            pull.operation->kind == Kind::kDelete;
      });
}

void Server::do_init(const OperationPtr& op, Time now) {
  SlicePtr slice = find(op->slice);
  if (!slice && op->rank == 0 && op->num_pieces != 0) {
    auto value = std::make_shared<Value>();
    value->pieces = std::move(op->pieces);
    slice = create(
        op->slice, op->spec, std::move(value), ++births_[op->slice], op->snap);
  }
  if (!slice && peer(0).state == PeerState::kLost) {
    reply_error(op, {ErrorCode::kWorkerLost, 0, op->slice, {}, {}});
    return;
  }
  if (!slice || slice->gone.count(op->rank) != 0 || slice->dying ||
      is_leaving(*slice, op->rank)) {
    waiting_init_[op->slice].push_back(op);
    return;
  }
  if (!(*slice->spec == *op->spec)) {
    reject(op, ErrorCode::kShape);
    return;
  }
  if (auto* stream = stream_of(*op)) {
    stream->failed.reset();
  }
  auto* member = slice->members.find(op->rank);
  if (!member) { // came late: as far as the slowest
    std::optional<int64_t> least;
    for (const auto& [rank, other] : slice->members) {
      least = std::min(least.value_or(other.applied), other.applied);
    }
    member = &slice->members[op->rank];
    member->applied = member->received = least.value_or(0);
  }
  member->attached = true;
  Reply done;
  done.round = member->received;
  done.version = slice->version;
  done.kid = slice->kid;
  const int32_t rank = op->rank;
  const SliceId id = op->slice;
  reply(op, std::move(done));
  if (rank != 0) {
    return;
  }
  if (auto* waiting = waiting_init_.find(id)) {
    const auto others = std::move(*waiting);
    waiting_init_.erase(id);
    for (const auto& other : others) {
      do_init(other, now);
    }
  }
}

Server::SlicePtr Server::create(
    const SliceId& id,
    std::shared_ptr<const KeySpec> spec,
    ValuePtr value,
    int64_t kid,
    int64_t snap) {
  auto slice = std::make_shared<Slice>();
  slice->id = id;
  slice->num_elements = num_elements(id, *spec).value_or(0);
  slice->spec = std::move(spec);
  slice->kid = kid;
  slice->snap = snap; // born after that snapshot, so not in it
  value->kid = kid;
  slice->slots[0] = std::move(value);
  if (config().leases) {
    slice->slots[1] = std::make_shared<Value>();
    act(MakeSlots{id, kid, slice->slots});
  }
  for (const auto& each : peers_) {
    // Who came back joins by its own init: see is_within.
    if (sync_ || (is_member(*each) && (each->inc <= 1 || each->rank == 0))) {
      slice->members[each->rank];
    }
  }
  slices_[id] = slice;
  return slice;
}

void Server::do_delete(const OperationPtr& op, Time now) {
  const SlicePtr slice = find(op->slice);
  const auto* member = slice ? slice->members.find(op->rank) : nullptr;
  if (!member) {
    reject(op, ErrorCode::kUnknown);
    return;
  }
  slice->pulls.push_back({op, member->received});
  advance(slice, now);
}

void Server::detach(
    const SlicePtr& slice,
    int32_t rank,
    Time now,
    bool deleted) {
  slice->members.erase(rank);
  slice->pending.erase(rank);
  auto& pulls = slice->pulls;
  pulls.erase(
      std::remove_if(
          pulls.begin(),
          pulls.end(),
          [&](const auto& pull) { return pull.operation->rank == rank; }),
      pulls.end());
  if (deleted) {
    slice->gone.insert(rank);
  }
  if (!slice->gone.empty() && slice->members.empty()) {
    slice->dying = true; // the last one deletes
    if (!slice->busy) {
      free_slice(slice, now);
    }
  } else {
    advance(slice, now);
  }
}

void Server::free_slice(const SlicePtr& slice, Time now) {
  if (find(slice->id) != slice) {
    return;
  }
  slices_.erase(slice->id);
  act(Erase{slice->id, slice->kid});
  if (auto* found = waiting_init_.find(slice->id)) {
    std::multimap<int32_t, OperationPtr> by_rank; // rank 0 creates it first
    for (const auto& op : *found) {
      by_rank.emplace(op->rank, op);
    }
    waiting_init_.erase(slice->id);
    for (const auto& [rank, op] : by_rank) {
      do_init(op, now);
    }
  }
}

void Server::do_push(const OperationPtr& op, Time now) {
  const SlicePtr slice = find(op->slice);
  auto* member = slice ? slice->members.find(op->rank) : nullptr;
  if (!member || !member->attached) {
    reject(op, ErrorCode::kUnknown);
    return;
  }
  const int64_t item_bytes =
      op->item_bytes == 0 ? slice->spec->item_bytes : op->item_bytes;
  const int64_t most = op->is_encoded ? max_encoded_bytes(*slice->spec)
                                      : slice->num_elements * item_bytes;
  if (op->total != slice->spec->total ||
      (!op->is_encoded && slice->spec->is_row_sparse()) ||
      op->num_bytes > static_cast<uint64_t>(most) ||
      (!op->is_encoded && op->num_bytes != static_cast<uint64_t>(most))) {
    reject(op, ErrorCode::kShape);
    return;
  }
  if (op->round != member->received + 1) {
    reject(op, ErrorCode::kRound);
    return;
  }
  ++member->received;
  slice->pending.add(op);
  if (op->kind == Kind::kPushPull) {
    slice->pulls.push_back({op, op->round});
  }
  advance(slice, now);
}

void Server::do_pull(const OperationPtr& op, Time now) {
  const SlicePtr slice = find(op->slice);
  const auto* member = slice ? slice->members.find(op->rank) : nullptr;
  if (!member || !member->attached) {
    reject(op, ErrorCode::kUnknown);
    return;
  }
  slice->pulls.push_back({op, member->received});
  advance(slice, now);
}

Server::SlicePtr Server::find(const SliceId& id) const {
  const auto* slice = slices_.find(id);
  return slice ? *slice : nullptr;
}

std::vector<Server::SlicePtr> Server::all_slices() const {
  std::vector<SlicePtr> result;
  result.reserve(slices_.size());
  for (const auto& [id, slice] : slices_) {
    result.push_back(slice);
  }
  return result;
}

void Server::restore(const Shard& shard) {
  if (!shard.options.empty()) {
    options_.clear();
    options_.insert(shard.options.begin(), shard.options.end());
  }
  committed_ = shard.gen;
  snap_seen_ = shard.number;
  for (const auto& [id, count] : shard.births) {
    births_[id] = count; // an incarnation's number is not used again
  }
  for (const auto& [id, shot] : shard.slices) {
    const SlicePtr slice = create(
        id,
        std::make_shared<const KeySpec>(shot->spec),
        shot->value,
        shot->kid,
        shard.number);
    slice->version = shot->version;
    slice->gen = shot->gen;
    slice->slots[0]->version = shot->version;
    if (sync_) {
      for (auto& [rank, member] : slice->members) {
        member.applied = member.received = shot->version;
      }
    }
  }
}

std::vector<Server::SliceView> Server::slices() const {
  std::vector<SliceView> views;
  for (const auto& [id, slice] : slices_) {
    if (slice->list) {
      continue; // its parts are here
    }
    const Slice& state = slice->current_state();
    SliceView view;
    view.slice = id;
    view.spec = slice->spec;
    view.kid = slice->kid;
    view.version = state.version;
    view.busy = state.busy != nullptr;
    const RoundPtr whole = view.busy ? state.busy->whole.lock() : nullptr;
    view.value = whole ? whole->source
        : view.busy    ? state.busy->source
                       : state.slots.at(state.current);
    if ((whole || slice->joint) && view.value) {
      view.value = view.value->part(slice->place);
    }
    for (const auto& [rank, member] : state.members) {
      view.clock.emplace_back(rank, member.applied);
    }
    std::sort(view.clock.begin(), view.clock.end());
    for (const auto& slot : slice->leases) {
      for (const auto& [rank, inc, opno] : slot) {
        const Peer& holder = peer(rank);
        view.leases.push_back(
            {rank,
             inc,
             opno,
             holder.inc == inc ? holder.state : PeerState::kLost});
      }
    }
    views.push_back(std::move(view));
  }
  return views;
}

} // namespace torchkv::dist

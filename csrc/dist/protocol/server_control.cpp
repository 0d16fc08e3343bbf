// What concerns the server as a whole: options, barriers, close, snapshots.
#include <algorithm>
#include <limits>
#include <utility>

#include "server.h"

namespace torchkv::dist {
namespace {

// Null if the slice is not among them.
const int64_t* find_count(const Counts& counts, const SliceId& id) {
  const auto at = std::lower_bound(
      counts.begin(), counts.end(), id, [](const auto& count, const auto& to) {
        return count.first < to;
      });
  return at != counts.end() && at->first == id ? &at->second : nullptr;
}

} // namespace

void Server::do_config(const OperationPtr& op, Time now) {
  options_[op->gen] = op->options;
  for (auto at = options_.begin(); at->first < op->retire;) {
    const bool is_used =
        std::any_of(slices_.begin(), slices_.end(), [&](const auto& slice) {
          return slice.second->current_state().gen == at->first;
        });
    at = is_used ? std::next(at) : options_.erase(at);
  }
  reply_done(op);
  for (const auto& slice : all_slices()) {
    advance(slice, now);
  }
}

// A barrier: an enter at every server (not with dist_sync), then a meeting at
// server 0, which alone decides who meets whom. Servers that decided for
// themselves would pair the ranks differently after a loss.

void Server::do_enter(const OperationPtr& op, Time now) {
  peer(op->rank).entered = Peer::Entered{op->phase, op->opno};
  entering_.push_back(op);
  for (const auto& slice : all_slices()) {
    advance(slice, now);
  }
  check_barriers();
}

void Server::do_meet(const OperationPtr& op) {
  peer(op->rank).meeting = op;
  check_barriers();
}

void Server::check_barriers() {
  if (!entering_.empty()) {
    const auto entering = entering_;
    for (const auto& op : entering) {
      if (auto answer = leaves_enter(*op)) {
        entering_.erase(std::find(entering_.begin(), entering_.end(), op));
        reply(op, std::move(*answer));
      }
    }
  }
  check_meeting();
}

// The answer, once what the worker pushed before is applied or has failed.
std::optional<Server::Reply> Server::leaves_enter(Operation& op) {
  const Peer& from = peer(op.rank);
  if (from.any_failed) {
    for (const auto& [id, stream] : from.streams) {
      if (stream.failed && find_count(op.counts, id)) {
        Reply refusal;
        refusal.kind = Kind::kError;
        refusal.error = std::make_shared<const Error>(*stream.failed);
        return refusal;
      }
    }
  }
  // What kept it last time comes first: it mostly still does.
  for (size_t i = 0; i < op.counts.size(); ++i) {
    if (waits_for(op, op.awaited)) {
      return std::nullopt;
    }
    op.awaited = (op.awaited + 1) % op.counts.size();
  }
  return Reply();
}

bool Server::waits_for(const Operation& op, size_t count) const {
  const auto& [id, pushes] = op.counts[count];
  const SlicePtr slice = find(id);
  const auto* member =
      slice ? slice->current_state().members.find(op.rank) : nullptr;
  return member && member->attached && pushes > member->applied;
}

void Server::check_meeting() {
  std::vector<OperationPtr> meeting;
  for (const auto& each : peers_) {
    if (is_member(*each)) {
      if (!each->meeting) {
        return;
      }
      meeting.push_back(each->meeting);
    }
  }
  if (meeting.empty()) {
    return;
  }
  const auto& first = meeting[0]->counts;
  const bool differ =
      std::any_of(meeting.begin(), meeting.end(), [&](const auto& op) {
        return op->counts != first;
      });
  if (sync_ && differ) {
    std::map<SliceId, int64_t> most;
    for (const auto& op : meeting) {
      for (const auto& [id, pushes] : op->counts) {
        auto& count = most[id];
        count = std::max(count, pushes);
      }
    }
    for (const auto& [id, pushes] : most) {
      for (const auto& op : meeting) {
        const auto* count = find_count(op->counts, id);
        if ((count ? *count : 0) < pushes) {
          fail({ErrorCode::kNeverPushed, op->rank, id, {}, {}});
          return;
        }
      }
    }
  }
  ++phase_;
  for (const auto& op : meeting) {
    peer(op->rank).meeting = nullptr;
    Reply done;
    done.phase = phase_;
    reply(op, std::move(done));
  }
}

void Server::do_close(const OperationPtr& op, Time now) {
  peer(op->rank).state = PeerState::kClosed;
  leave(op->rank, now);
}

// close() ends when no worker needs this server any more: its process may exit.
void Server::check_closed() {
  if (any_member()) {
    return;
  }
  for (const auto& [id, slice] : slices_) {
    // A round that waits for its factor after an error will never get it.
    if (slice->busy && !(fatal_ && slice->busy->measured && !slice->applying)) {
      return;
    }
  }
  std::vector<OperationPtr> closes;
  for (const auto& [number, op] : open_) {
    if (op->kind == Kind::kClose) {
      closes.push_back(op);
    }
  }
  for (const auto& op : closes) {
    reply_done(op);
  }
}

// Whom an operation waits for; nobody: this server itself.
std::vector<int32_t> Server::missing(const Message& message) const {
  const int32_t rank = message.header.rank;
  std::vector<int32_t> result;
  SlicePtr slice = find(message.slice);
  if (slice && slice->busy && message.kind != Kind::kInit) {
    const auto& pushes = slice->busy->pushes;
    if (sync_ ||
        std::any_of(pushes.begin(), pushes.end(), [&](const auto& push) {
          return push.opno == message.opno && push.rank == rank;
        })) {
      return result;
    }
  }
  const bool is_meeting = message.kind == Kind::kMeet;
  if (is_meeting && sync_ &&
      std::any_of(slices_.begin(), slices_.end(), [&](const auto& each) {
        const auto& pending = each.second->pending;
        return !pending.empty() && !pending.has(rank);
      })) {
    return {rank}; // the caller, if others wait for its push
  }
  if (is_meeting) {
    for (const auto& each : peers_) {
      if (is_member(*each) && !each->meeting) {
        result.push_back(each->rank);
      }
    }
    return result;
  }
  if (message.kind == Kind::kEnter || message.kind == Kind::kSnapshot) {
    // For pushes that others hold up.
    for (const auto& [id, each] : slices_) {
      const auto* count = find_count(message.counts, id);
      const auto* member = each->current_state().members.find(rank);
      if (count && member && *count > member->applied) {
        slice = each->joint ? each->joint->shared_from_this() : each;
        break;
      }
    }
  }
  if (message.kind == Kind::kInit) {
    if (!slice) {
      return {0}; // for rank 0's value
    }
    for (const auto& [member, counts] : slice->members) {
      if (member != rank) {
        result.push_back(member); // to delete the old incarnation
      }
    }
    return result;
  }
  if (slice && sync_) {
    for (const auto& each : peers_) {
      if (!slice->pending.has(each->rank)) {
        result.push_back(each->rank);
      }
    }
  } else if (slice) {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const auto& [member, counts] : slice->members) {
      least = std::min(least, counts.applied);
    }
    for (const auto& [member, counts] : slice->members) {
      if (counts.applied == least) {
        result.push_back(member);
      }
    }
  }
  return result;
}

// Snapshots: a slice as it was after rank 0's pushes before its snapshot call.

void Server::do_snapshot(const OperationPtr& op) {
  take_apart_lists();
  snap_seen_ = std::max(snap_seen_, op->snap);
  snapshots_[op->snap] = op;
  for (const auto& slice : all_slices()) {
    reached_snapshots(slice);
  }
  check_snapshots();
}

// Rank 0 may never push this slice again, so its stamp alone is not enough.
void Server::reached_snapshots(const SlicePtr& slice) {
  if (slice->busy || fatal_ || snapshots_.empty()) {
    return; // on_applied comes back to a busy one
  }
  std::map<int64_t, const Operation*> by_number;
  for (const auto& [number, op] : snapshots_) {
    by_number.emplace(number, op.get());
  }
  const auto* rank_0 = slice->members.find(0);
  for (const auto& [number, op] : by_number) {
    const auto* count = find_count(op->counts, slice->id);
    if (count && (!rank_0 || rank_0->applied >= *count)) {
      capture(*slice, number);
    }
  }
}

// Puts the slice as it is now into the snapshots up to `number` that lack it.
void Server::capture(Slice& slice, int64_t number) {
  if (number <= slice.snap) {
    return;
  }
  for (int64_t n = slice.snap + 1; n <= number; ++n) {
    auto shot = std::make_shared<Shot>();
    shot->spec = *slice.spec;
    shot->value = slice.slots.at(slice.current);
    shot->version = slice.version;
    shot->gen = slice.gen;
    shot->kid = slice.kid;
    captures_[n][slice.id] = std::move(shot);
  }
  slice.snap = number;
  snap_seen_ = std::max(snap_seen_, number);
  check_snapshots();
}

void Server::check_snapshots() {
  for (const auto& [number, op] : snapshots_) {
    if (op->written) {
      continue;
    }
    const auto* captured = captures_.find(number);
    auto& count = op->num_captured;
    while (captured && count < op->counts.size() &&
           captured->contains(op->counts[count].first)) {
      ++count;
    }
    if (count < op->counts.size()) {
      continue;
    }
    op->written = true;
    Shard shard;
    shard.number = number;
    shard.job = config().job;
    shard.server = sid_;
    shard.gen = op->gen;
    for (const auto& [id, pushes] : op->counts) {
      shard.slices.emplace_back(id, *captured->find(id));
    }
    for (const auto& [id, born] : births_) {
      shard.births.emplace_back(id, born);
    }
    for (const auto& [gen, options] : options_) {
      if (gen <= op->gen) {
        shard.options.emplace_back(gen, options);
      }
    }
    act(WriteShard{std::move(shard)});
  }
}

void Server::on_written(
    int64_t snapshot,
    const std::optional<std::string>& error,
    Time now) {
  now_ = now;
  const auto* found = snapshots_.find(snapshot);
  if (!found) {
    return;
  }
  const OperationPtr op = *found;
  snapshots_.erase(snapshot);
  // Also those of older snapshots that nobody asks for any more.
  for (auto at = captures_.begin(); at != captures_.end();) {
    at = at->first <= snapshot && !snapshots_.contains(at->first)
        ? captures_.erase(at)
        : std::next(at);
  }
  if (error) {
    reply_error(op, {ErrorCode::kWrite, sid_, {}, *error, {}});
  } else {
    reply_done(op);
  }
}

} // namespace torchkv::dist

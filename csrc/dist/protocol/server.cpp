#include "server.h"

#include <algorithm>
#include <utility>

namespace torchkv::dist {

ServerOperation::ServerOperation(const Message& message)
    : rank(message.header.rank),
      inc(message.header.inc),
      kind(message.kind),
      slice(message.slice),
      list(message.list),
      count(message.count),
      opno(message.opno),
      prev(message.prev),
      prevs(message.prevs),
      priority(message.priority),
      gen(message.gen),
      snap(message.snap),
      phase(message.header.phase),
      num_pieces(message.pieces),
      region(message.region),
      total(message.total),
      is_encoded(message.is_encoded),
      dtype(message.dtype),
      item_bytes(message.item_bytes),
      round(message.round),
      base(message.base),
      min_version(message.min_version),
      group(message.group),
      factor(message.factor),
      retire(message.retire) {
  if (kind == Kind::kInit) {
    spec = std::make_shared<const KeySpec>(message.spec);
  } else if (kind == Kind::kConfig) {
    options = message.payload;
  } else if (kind != Kind::kClose) {
    counts = message.counts;
  }
}

Server::Server(
    int32_t sid,
    int64_t sinc,
    const Config& config,
    Time now,
    const Shard* restored)
    : Core(config, now),
      sid_(sid),
      sinc_(sinc),
      sync_(config.policy.is_sync()),
      now_(now) {
  for (int32_t rank = 0; rank < config.num_workers; ++rank) {
    peers_.push_back(
        std::make_unique<Peer>(rank, 0, PeerState::kExpected, now));
  }
  options_.emplace(0, Blob());
  if (restored) {
    restore(*restored);
  }
}

Server::~Server() = default;

void Server::on_message(const Frame& frame, Time now) {
  now_ = now;
  for (const auto& message : frame) {
    if (is_acceptable(message)) {
      receive(message, now);
    }
  }
}

void Server::flush() {
  for (auto& [from, pieces] : got_) {
    Message message = make(Kind::kGot, from.first);
    message.header.inc = from.second;
    message.got = std::move(pieces);
    answer_to(from.first, std::move(message));
  }
  got_.clear();
  send_all_pieces(); // as late as this, they share frames
}

void Server::receive(const Message& message, Time now) {
  const Header& header = message.header;
  Peer& from = peer(header.rank);
  if (message.kind == Kind::kHello) {
    greet(message, now);
  } else if (
      header.inc != from.inc || from.state == PeerState::kLost ||
      header.sinc != sinc_) {
    if (header.inc <= from.inc) {
      expire(message);
    }
  } else {
    from.heard = now;
    committed_ = std::max(committed_, header.committed);
    phase_ = std::max(phase_, header.phase);
    if (header.floor > from.floor) {
      from.floor = header.floor;
      forget(from, now);
    }
    handle(from, message, now);
    from.has_pieces = true; // there may be credit for them now
  }
}

void Server::handle(Peer& from, const Message& message, Time now) {
  switch (message.kind) {
    case Kind::kHeartbeat: {
      if (message.error && sync_) {
        fail(*message.error);
      }
      Message alive = make(Kind::kAlive, from.rank);
      alive.error = fatal_;
      answer_to(from.rank, std::move(alive));
      break;
    }
    case Kind::kGot:
      for (const auto& piece : message.got) {
        from.queue.ack(piece);
      }
      break;
    case Kind::kFree: {
      for (const int64_t opno : message.opnos) {
        end_lease(from, opno, now);
      }
      Message freed = make(Kind::kFreed, from.rank);
      freed.opnos = message.opnos;
      answer_to(from.rank, std::move(freed));
      break;
    }
    case Kind::kBye:
      if (from.state == PeerState::kUp) {
        from.state = PeerState::kClosed;
        leave(from.rank, now);
      }
      break;
    default:
      if (message.list) {
        receive_list(from, message, now);
      } else {
        receive_single(from, message, now);
      }
  }
}

void Server::on_timer(Time now) {
  now_ = now;
  const Time gap = tick(now);
  for (const auto& each : peers_) {
    each->heard = std::min(now, each->heard + gap);
  }
  for (int32_t rank = 0; rank < config().num_workers; ++rank) {
    const Peer& each = peer(rank);
    const Time silence = now - each.heard;
    if ((each.state == PeerState::kExpected && silence > config().join) ||
        (each.state == PeerState::kUp && silence > config().lost)) {
      lose(rank, now);
    }
    peer(rank).has_pieces = true;
  }
  if (sync_ || one_is_enough()) {
    return; // no round waits for a time
  }
  for (const auto& slice : all_slices()) {
    if (slice->first_at) {
      advance(slice, now);
    }
  }
}

void Server::on_peer_lost(int32_t rank, Time now) {
  now_ = now;
  if (rank >= 0 && rank < config().num_workers &&
      peer(rank).state == PeerState::kUp) {
    lose(rank, now);
  }
}

void Server::send_all_pieces() {
  for (const auto& each : peers_) {
    if (each->has_pieces) {
      send_pieces(*each);
    }
  }
}

void Server::greet(const Message& hello, Time now) {
  const int32_t rank = hello.header.rank;
  const int64_t inc = hello.header.inc;
  const Peer& known = peer(rank);
  if (hello.header.digest != config().digest) {
    Message message = make(Kind::kReject, rank);
    message.header.inc = inc;
    message.error = Error{ErrorCode::kConfig, rank, {}, {}, {}};
    answer_to(rank, std::move(message));
    return;
  }
  if (inc < known.inc ||
      (inc == known.inc && known.state == PeerState::kLost)) {
    expire(hello);
    return;
  }
  if (inc > known.inc) {
    if (inc > 1) { // the process was replaced, perhaps unseen here
      lose(rank, now);
    }
    peers_[static_cast<size_t>(rank)] =
        std::make_unique<Peer>(rank, inc, PeerState::kUp, now);
  }
  peer(rank).heard = now;
  Message welcome = make(Kind::kWelcome, rank);
  welcome.gen = options_.rbegin()->first;
  if (rank == 0 && inc > 1) {
    welcome.payload = options_.rbegin()->second; // see Worker::complete_config
  }
  welcome.snap = snap_seen_;
  welcome.phase = phase_;
  answer_to(rank, std::move(welcome));
}

void Server::expire(const Message& message) {
  const int32_t rank = message.header.rank;
  Message expired = make(Kind::kExpired, rank);
  expired.header.inc = message.header.inc;
  expired.by = peer(rank).inc;
  answer_to(rank, std::move(expired));
}

void Server::lose(int32_t rank, Time now) {
  Peer& lost = peer(rank);
  if (!is_member(lost)) {
    return;
  }
  take_apart_lists();
  lost.state = PeerState::kLost;
  // Half-received pushes and the values of answers go with them.
  lost.streams.clear();
  lost.entries.clear();
  lost.ended.clear();
  lost.queue = PieceQueue();
  lost.has_pieces = false;
  for (auto at = open_.begin(); at != open_.end();) {
    at = at->second->rank == rank ? open_.erase(at) : std::next(at);
  }
  entering_.erase(
      std::remove_if(
          entering_.begin(),
          entering_.end(),
          [&](const auto& op) { return op->rank == rank; }),
      entering_.end());
  lost.meeting = nullptr;
  if (sync_) {
    fail({ErrorCode::kWorkerLost, rank, {}, {}, {}});
  } else {
    leave(rank, now);
  }
  end_leases(lost, now);
}

// A worker is lost or closed: nothing waits for it any more, and nothing of it
// remains but what it has in a round that is being applied, which takes its
// course.
void Server::leave(int32_t rank, Time now) {
  take_apart_lists();
  for (auto& [id, ops] : waiting_init_) {
    ops.erase(
        std::remove_if(
            ops.begin(),
            ops.end(),
            [&](const auto& op) { return op->rank == rank; }),
        ops.end());
  }
  for (const auto& slice : all_slices()) {
    detach(slice, rank, now, false);
  }
  // Its pulls went first: else they would be answered now.
  end_leases(peer(rank), now);
  if (rank == 0) {
    snapshots_.clear();
    captures_.clear();
    std::vector<SliceId> unborn;
    for (const auto& [id, ops] : waiting_init_) {
      if (!slices_.contains(id)) {
        unborn.push_back(id);
      }
    }
    for (const auto& id : unborn) {
      const auto ops = std::exchange(waiting_init_[id], {});
      waiting_init_.erase(id);
      for (const auto& op : ops) {
        do_init(op, now);
      }
    }
  }
  check_barriers();
  check_closed();
}

void Server::fail(const Error& error) {
  if (fatal_) {
    return;
  }
  fatal_ = error;
  std::vector<OperationPtr> ops;
  ops.reserve(open_.size());
  for (const auto& [number, op] : open_) {
    ops.push_back(op);
  }
  for (const auto& op : ops) {
    reply_error(op, error);
  }
  for (const auto& each : peers_) {
    if (each->state == PeerState::kUp) {
      Message message = make(Kind::kFatal, each->rank);
      message.error = error;
      answer_to(each->rank, std::move(message));
    }
  }
}

bool Server::any_member() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& each) {
    return is_member(*each);
  });
}

Message Server::make(Kind kind, int32_t rank) const {
  Message message;
  message.kind = kind;
  Header& header = message.header;
  header.job = config().job;
  header.store = config().store;
  header.rank = rank;
  header.server = sid_;
  header.inc = peer(rank).inc;
  header.sinc = sinc_;
  header.committed = committed_;
  return message;
}

void Server::answer_to(int32_t rank, Message message) {
  send({Address::Role::kWorker, rank}, std::move(message));
}

} // namespace torchkv::dist

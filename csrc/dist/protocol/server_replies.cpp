// Answers, which are kept until the worker says that it has them, and leases.
#include <algorithm>
#include <tuple>
#include <utility>

#include "server.h"

namespace torchkv::dist {

// The worker has all answers below its floor.
void Server::forget(Peer& from, Time now) {
  using Order = std::tuple<int64_t, int64_t, int64_t>; // stream, reply, opno
  std::vector<Order> dropped;
  const auto end = from.entries.lower_bound(from.floor);
  for (auto at = from.entries.begin(); at != end;) {
    const auto& entry = at->second;
    if (entry.reply) {
      dropped.emplace_back(entry.stream->order, entry.replied, at->first);
    } else if (entry.operation->number == 0 && !entry.operation->held) {
      const int64_t opno = at++->first; // its other pieces will be dropped
      erase_entry(from, opno);
      continue;
    }
    ++at;
  }
  std::sort(dropped.begin(), dropped.end()); // leases end in this order
  for (const auto& [stream, number, opno] : dropped) {
    drop_reply(from, opno, now);
  }
  for (auto at = from.ended.begin(); at != from.ended.end();) {
    const auto* stream = from.streams.find(*at);
    const bool revived = !stream || !stream->ended;
    if (!revived && (stream->last >= from.floor || stream->num_entries != 0)) {
      ++at;
      continue;
    }
    if (!revived) { // late copies are below the floor
      from.streams.erase(*at);
    }
    at = from.ended.erase(at);
  }
}

void Server::drop_replies(Peer& from, Stream& stream, int64_t below, Time now) {
  c10::SmallVector<int64_t, 8> dropped;
  for (const int64_t opno : stream.replied) {
    if (opno < below) {
      dropped.push_back(opno);
    }
  }
  if (dropped.empty()) {
    return;
  }
  auto& replied = stream.replied;
  replied.erase(
      std::remove_if(
          replied.begin(),
          replied.end(),
          [&](int64_t opno) { return opno < below; }),
      replied.end());
  for (const int64_t opno : dropped) {
    drop_reply(from, opno, now);
  }
}

void Server::drop_reply(Peer& from, int64_t opno, Time now) {
  const auto at = from.entries.find(opno);
  if (at != from.entries.end() && at->second.reply) {
    erase_entry(from, opno);
    end_lease(from, opno, now);
  }
}

void Server::erase_entry(Peer& from, int64_t opno) {
  const auto at = from.entries.find(opno);
  if (at != from.entries.end()) {
    Stream& stream = *at->second.stream;
    --stream.num_entries;
    auto& opnos = stream.opnos;
    opnos.erase(std::remove(opnos.begin(), opnos.end(), opno), opnos.end());
    from.entries.erase(at);
  }
}

// A lease is a promise not to write to the slot. It ends when the worker has
// copied it out, or with the worker's session: then the region's stamp tells a
// worker that is not as lost as it seemed.
void Server::end_lease(Peer& from, int64_t opno, Time now) {
  const auto* found = from.leases.find(opno);
  if (!found) {
    return;
  }
  const Peer::Lease lease = *found;
  from.leases.erase(opno);
  lease.slice->leases.at(lease.slot).erase({from.rank, from.inc, opno});
  if (find(lease.slice->id) == lease.slice) {
    advance(lease.slice, now); // an update may have waited for the slot
  }
}

void Server::end_leases(Peer& from, Time now) {
  std::vector<int64_t> opnos;
  for (const auto& [opno, lease] : from.leases) {
    opnos.push_back(opno);
  }
  for (const int64_t opno : opnos) {
    end_lease(from, opno, now);
  }
}

void Server::reply(const OperationPtr& op, Reply reply) {
  const auto found = open_.find(op->number);
  if (found == open_.end()) {
    return; // its worker has gone; its heir may use the same opno
  }
  const OperationPtr answered = found->second; // `op` may be what is erased
  open_.erase(found);
  auto& entries = peer(answered->rank).entries;
  const auto at = entries.find(answered->opno);
  if (at == entries.end() || at->second.operation != answered) {
    return;
  }
  auto& entry = at->second;
  entry.operation = nullptr;
  entry.reply = std::move(reply);
  entry.reply->count = static_cast<int32_t>(answered->count);
  entry.priority = answered->priority;
  entry.replied = num_replies_ + 1;
  num_replies_ += answered->count;
  entry.stream->replied.push_back(answered->opno);
  answer(answered->rank, answered->opno, *entry.reply, {}, answered->priority);
}

void Server::reply_done(const OperationPtr& op) {
  reply(op, Reply());
}

void Server::reply_error(const OperationPtr& op, const Error& error) {
  Reply refusal;
  refusal.kind = Kind::kError;
  refusal.error = std::make_shared<const Error>(error);
  reply(op, std::move(refusal));
}

void Server::answer(
    int32_t rank,
    int64_t opno,
    const Reply& reply,
    const std::vector<int32_t>& have,
    int64_t priority) {
  if (reply.value) {
    Peer& to = peer(rank);
    const auto& pieces = reply.value->pieces;
    std::vector<bool> is_there(have.empty() ? 0 : pieces.size());
    for (const int32_t index : have) {
      if (index >= 0 && static_cast<size_t>(index) < is_there.size()) {
        is_there[static_cast<size_t>(index)] = true;
      }
    }
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (have.empty() || !is_there[i]) {
        to.queue.put(
            {opno, static_cast<int32_t>(i)}, pieces[i].size(), priority);
        to.has_pieces = true;
      }
    }
    return;
  }
  Message message = make(reply.kind, rank);
  message.opno = opno;
  message.count = reply.count;
  message.version = reply.version;
  message.kid = reply.kid;
  message.round = reply.round;
  message.age = reply.age;
  message.phase = reply.phase;
  message.partial = reply.partial;
  message.region = reply.lease;
  if (reply.error) {
    message.error = *reply.error;
  }
  answer_to(rank, std::move(message));
}

void Server::send_pieces(Peer& to) {
  to.has_pieces = false;
  while (to.state == PeerState::kUp) {
    const auto batch = to.queue.pop(config(), now_);
    if (batch.pieces.empty()) {
      return;
    }
    for (const auto& piece : batch.pieces) {
      const Reply* reply = find_value(to, piece.first);
      if (!reply) {
        to.queue.ack(piece); // the worker has it meanwhile
        continue;
      }
      const auto& pieces = reply->value->pieces;
      Message message = make(Kind::kValue, to.rank);
      message.opno = piece.first;
      message.count = reply->count;
      message.index = piece.second;
      message.pieces = static_cast<int32_t>(pieces.size());
      message.payload = pieces[static_cast<size_t>(piece.second)];
      message.version = reply->version;
      message.kid = reply->kid;
      message.round = reply->round;
      message.frame = batch.frame;
      answer_to(to.rank, std::move(message));
    }
  }
}

// The kept answer to a pull; null: none.
const Server::Reply* Server::find_value(const Peer& to, int64_t opno) {
  const auto at = to.entries.find(opno);
  if (at == to.entries.end()) {
    return nullptr;
  }
  const auto& reply = at->second.reply;
  return reply && reply->value ? &*reply : nullptr;
}

} // namespace torchkv::dist

// Lists: how slices that have been one become several again.
#include <algorithm>
#include <utility>

#include "server.h"

namespace torchkv::dist {
namespace {

ServerReply part_of(const ServerReply& reply, size_t i) {
  ServerReply part = reply;
  part.count = 1;
  if (reply.value) {
    part.value = reply.value->part(i);
  }
  return part;
}

} // namespace

// Does on each slice what an operation on the list has begun.
void Server::take_apart(const OperationPtr& op, Time now) {
  take_apart(find(op->slice));
  for (int64_t i = 0; i < op->count; ++i) {
    const auto at = open_.find(op->number + i);
    if (at != open_.end()) {
      const OperationPtr part = at->second;
      perform(part, now);
    }
  }
}

// All is from here on as it would be if the slices had never been together.
void Server::take_apart(const SlicePtr& joint) {
  slices_.erase(joint->id);
  lists_.erase(std::find(lists_.begin(), lists_.end(), joint));
  const RoundPtr busy = joint->busy;
  for (size_t i = 0; i < joint->parts.size(); ++i) {
    Slice& part = *joint->parts[i];
    part.joint = nullptr;
    part.version = joint->version;
    part.gen = joint->gen;
    for (auto& [rank, member] : part.members) {
      member = *joint->members.find(rank); // the same ranks
    }
    part.first_at = joint->first_at;
    part.quorum_at = joint->quorum_at;
    part.waited = joint->waited;
    if (joint->slots[0]) {
      part.slots[0] = joint->slots[0]->part(i);
      part.slots[0]->kid = part.kid;
      part.slots[0]->version = part.version;
    }
    if (busy) {
      part.applying = joint->applying;
      part.busy = part_of(busy, i);
      busy->apart.push_back(part.busy);
    }
  }
  Apart apart;
  for (const auto& each : peers_) {
    if (each->streams.contains(joint->id)) {
      take_apart(*each, *joint, apart);
    }
  }
  joint->pending.for_each([&](const OperationPtr& op) {
    const auto& ops = apart.find(op);
    for (size_t i = 0; i < joint->parts.size(); ++i) {
      joint->parts[i]->pending.add(ops[i]);
    }
  });
  for (const auto& pull : joint->pulls) {
    const auto& ops = apart.find(pull.operation);
    for (size_t i = 0; i < joint->parts.size(); ++i) {
      joint->parts[i]->pulls.push_back({ops[i], pull.need});
    }
  }
  joint->parts.clear();
}

const std::vector<ServerOperationPtr>& Server::Apart::find(
    const OperationPtr& op) {
  auto& ops = ops_[op.get()];
  if (!ops.empty()) {
    return ops;
  }
  Operation bare = *op; // without what only the list has
  bare.list = nullptr;
  bare.prevs.clear();
  bare.count = 1;
  for (size_t i = 0; i < op->list->size(); ++i) {
    auto part = std::make_shared<Operation>(bare);
    const auto number = static_cast<int64_t>(i);
    part->slice = op->list->slice(i);
    part->number += op->number == 0 ? 0 : number;
    part->opno += number;
    part->prev = number_of(op->prev, op->prevs, i);
    if (op->num_pieces != 0) {
      part->total = op->list->num_elements(i);
      const auto size = static_cast<size_t>(op->item_bytes);
      part->num_bytes = static_cast<size_t>(part->total) * size;
      for (auto& piece : part->pieces) {
        piece = op->list->part_of(piece, i, size);
      }
    }
    ops.push_back(std::move(part));
  }
  return ops;
}

void Server::take_apart(Peer& of, const Slice& joint, Apart& apart) {
  const Stream& stream = *of.streams.find(joint.id);
  std::vector<Stream*> streams;
  for (size_t i = 0; i < joint.parts.size(); ++i) {
    Stream& part = open_stream(of, joint.parts[i]->id);
    const auto number = static_cast<int64_t>(i);
    part.last = stream.last == 0 ? 0 : number_of(stream.last, stream.lasts, i);
    for (const int64_t opno : stream.replied) {
      part.replied.push_back(opno + number);
    }
    for (const auto& [prev, op] : stream.held) {
      const OperationPtr& own = apart.find(op)[i];
      part.held[own->prev] = own;
    }
    streams.push_back(&part);
  }
  for (const int64_t opno : stream.opnos) {
    const Peer::Entry entry = std::move(of.entries.extract(opno).mapped());
    const OperationPtr& op = entry.operation;
    const bool is_queued = of.queue.contains({opno, 0});
    if (op && open_.erase(op->number) != 0) {
      for (const auto& part : apart.find(op)) {
        open_[part->number] = part;
      }
    }
    for (size_t i = 0; i < streams.size(); ++i) {
      const auto number = static_cast<int64_t>(i);
      Peer::Entry part;
      part.stream = streams[i];
      part.replied = entry.replied + number;
      if (op) {
        part.operation = apart.find(op)[i];
      }
      if (entry.reply) {
        part.reply = dist::part_of(*entry.reply, i);
        if (is_queued && part.reply->value) {
          of.queue.put(
              {opno + number, 0},
              part.reply->value->pieces[0].size(),
              entry.priority);
          of.has_pieces = true;
        }
      }
      // Taken already: by no right worker.
      if (of.entries.try_emplace(opno + number, std::move(part)).second) {
        ++streams[i]->num_entries;
      }
    }
  }
  of.streams.erase(joint.id);
}

// What the core needs of a round whose update is under way: meanwhile all else
// in it is the driver's.
RoundPtr Server::part_of(const RoundPtr& whole, size_t i) {
  const Round& round = *whole;
  const RoundPart& of = (*round.parts)[i];
  auto part = std::make_shared<Round>();
  part->whole = whole;
  part->slice = of.slice;
  part->spec = of.spec;
  part->num_elements = of.num_elements;
  part->kid = round.kid;
  part->version = round.version;
  part->number = round.number;
  part->gen = round.gen;
  part->waited = round.waited;
  part->begun = round.begun;
  for (const auto& push : round.pushes) {
    Push& own = part->pushes.emplace_back();
    own.rank = push.rank;
    own.inc = push.inc;
    own.opno = push.opno + static_cast<int64_t>(i);
    own.round = push.round;
    own.base = push.base;
    own.kind = push.kind;
    own.number = push.number + static_cast<int64_t>(i);
  }
  return part;
}

void Server::take_apart_lists() {
  const auto lists = lists_;
  for (const auto& joint : lists) {
    take_apart(joint);
  }
}

// Also of an update whose list has come apart meanwhile.
void Server::on_list_applied(
    const RoundPtr& round,
    const std::optional<std::string>& error,
    Time now) {
  if (round->apart.empty()) {
    take_apart(find(round->slice));
  }
  const ValuePtr& value = round->result ? round->result : round->source;
  for (size_t i = 0; i < round->apart.size(); ++i) {
    round->apart[i]->result = value->part(i);
    on_applied(
        round->apart[i], round->errors.empty() ? error : round->errors[i], now);
  }
}

} // namespace torchkv::dist

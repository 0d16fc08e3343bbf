// Streams: each operation is done once, in program order.
#include <algorithm>
#include <utility>

#include "server.h"

namespace torchkv::dist {
namespace {

// Whether `op` is the next operation of the stream.
bool is_next(const ServerStream& stream, const ServerOperation& op) {
  for (size_t i = 0; i < op.prevs.size(); ++i) {
    if (op.prevs[i] != number_of(stream.last, stream.lasts, i)) {
      return false;
    }
  }
  return !op.prevs.empty() ||
      (op.prev == stream.last && stream.lasts.empty()) ||
      (op.prev == 0 && stream.ended); // an init begins a stream anew
}

} // namespace

void Server::receive_operation(Peer& from, const Message& message, Time now) {
  if (message.opno < from.floor) {
    return; // a late copy of something long answered
  }
  const auto same_number = from.entries.find(message.opno);
  if (same_number != from.entries.end() &&
      same_number->second.stream->id != message.slice) {
    return;
  }
  Stream& stream = open_stream(from, message.slice);
  drop_replies(from, stream, message.acked, now);
  note_got(message);
  const auto at = from.entries.find(message.opno);
  const auto* entry = at == from.entries.end() ? nullptr : &at->second;
  if (entry && entry->reply) {
    answer(
        from.rank, message.opno, *entry->reply, message.have, message.priority);
    return;
  }
  if (fatal_ && message.kind != Kind::kClose) {
    Message refusal = make(Kind::kError, from.rank);
    refusal.opno = message.opno;
    refusal.count = message.count;
    refusal.error = fatal_;
    answer_to(from.rank, std::move(refusal));
    return;
  }
  if (message.opno <= stream.last ||
      (entry && entry->operation && entry->operation->held)) {
    Message wait = make(Kind::kWait, from.rank);
    wait.opno = message.opno;
    wait.count = message.count;
    wait.missing = missing(message);
    answer_to(from.rank, std::move(wait));
    return;
  }
  OperationPtr op = stage(from, stream, message);
  if (!op) {
    return;
  }
  if (!is_next(stream, *op)) {
    hold(from, stream, op);
    return;
  }
  begin(from, stream, op, now);
  if (message.list && !from.streams.contains(message.slice)) {
    for (size_t i = 0; i < message.list->size(); ++i) { // it came apart
      begin_held(from, message.list->slice(i), now);
    }
  } else {
    begin_held(from, message.slice, now);
  }
}

// What has waited for the stream's last operation to begin.
void Server::begin_held(Peer& from, const SliceId& id, Time now) {
  auto* stream = from.streams.find(id);
  while (stream && !stream->held.empty()) {
    const OperationPtr op = next_held(from, *stream);
    if (!op) {
      return;
    }
    begin(from, *stream, op, now);
    if (op->list && !from.streams.contains(id)) {
      for (size_t i = 0; i < op->list->size(); ++i) {
        begin_held(from, op->list->slice(i), now);
      }
      return;
    }
  }
}

Server::Stream& Server::open_stream(Peer& from, const SliceId& id) {
  if (auto* stream = from.streams.find(id)) {
    return *stream;
  }
  auto& stream = from.streams[id];
  stream.id = id;
  stream.order = ++from.num_streams;
  return stream;
}

void Server::note_got(const Message& message) {
  if (message.index < 0) {
    return;
  }
  const std::pair from{message.header.rank, message.header.inc};
  auto at = std::find_if(got_.begin(), got_.end(), [&](const auto& each) {
    return each.first == from;
  });
  if (at == got_.end()) {
    at = got_.emplace(got_.end(), from, Pieces());
  }
  at->second.emplace_back(message.opno, message.index);
}

// The operation, if all of it is here.
Server::OperationPtr Server::stage(
    Peer& from,
    Stream& stream,
    const Message& message) {
  auto at = from.entries.find(message.opno);
  if (at == from.entries.end()) {
    if (message.pieces != 0 && message.index < 0) {
      return nullptr; // asks for an operation of which nothing is here
    }
    at = from.entries.emplace_hint(at, message.opno, Peer::Entry());
    at->second.stream = &stream;
    at->second.operation = std::make_shared<Operation>(message);
    ++stream.num_entries;
    if (message.list) {
      stream.opnos.push_back(message.opno);
    }
  }
  OperationPtr op = at->second.operation;
  if (!op || op->number != 0 || op->kind != message.kind ||
      op->prev != message.prev || op->num_pieces != message.pieces) {
    return nullptr;
  }
  const auto num_pieces = static_cast<size_t>(op->num_pieces);
  if (num_pieces == 1 && message.index == 0) {
    op->pieces.assign(1, message.payload);
  } else if (message.index >= 0) {
    op->staged[message.index] = message.payload;
    if (op->staged.size() == num_pieces) {
      for (auto& [index, piece] : std::exchange(op->staged, {})) {
        op->pieces.push_back(std::move(piece));
      }
    }
  }
  if (op->pieces.size() < num_pieces) {
    return nullptr;
  }
  if (op->region) {
    op->pieces.clear();
    op->num_bytes = op->region->size;
  }
  for (const auto& piece : op->pieces) {
    op->num_bytes += piece.size();
  }
  return op;
}

void Server::hold(Peer& from, Stream& stream, const OperationPtr& op) {
  auto& held = stream.held[op->prev];
  if (held) {
    erase_entry(from, held->opno);
  }
  held = op;
  held->held = true;
}

Server::OperationPtr Server::next_held(Peer& from, Stream& stream) {
  auto at = stream.held.find(stream.last);
  if (at == stream.held.end() && stream.ended) {
    at = stream.held.find(0);
  }
  if (at == stream.held.end()) {
    return nullptr;
  }
  OperationPtr op = std::move(at->second);
  stream.held.erase(at);
  op->held = false;
  if (op->opno <= stream.last) { // no right worker's
    erase_entry(from, op->opno);
    return nullptr;
  }
  return op;
}

void Server::begin(
    Peer& from,
    Stream& stream,
    const OperationPtr& op,
    Time now) {
  op->number = num_operations_ + 1;
  num_operations_ += op->count;
  stream.last = op->opno;
  stream.lasts.clear();
  stream.ended = op->kind == Kind::kDelete;
  if (stream.ended) {
    from.ended.insert(stream.id);
  }
  if (from.entered && op->opno > from.entered->opno &&
      op->kind != Kind::kMeet) {
    from.entered.reset(); // it has left the barrier, perhaps with an error
  }
  open_[op->number] = op;
  if (op->list && !is_joint(*op)) {
    take_apart(op, now); // `stream` is no more
    return;
  }
  if (stream.failed && op->kind != Kind::kInit && op->kind != Kind::kDelete) {
    reply_error(op, *stream.failed);
    return;
  }
  perform(op, now);
}

void Server::perform(const OperationPtr& op, Time now) {
  switch (op->kind) {
    case Kind::kInit:
      return do_init(op, now);
    case Kind::kPush:
    case Kind::kPushPull:
      return do_push(op, now);
    case Kind::kPull:
      return do_pull(op, now);
    case Kind::kDelete:
      return do_delete(op, now);
    case Kind::kConfig:
      return do_config(op, now);
    case Kind::kEnter:
      return do_enter(op, now);
    case Kind::kMeet:
      return do_meet(op);
    case Kind::kSnapshot:
      return do_snapshot(op);
    case Kind::kClose:
      return do_close(op, now);
    case Kind::kNorm:
      return do_norm(op);
    case Kind::kFactor:
      return do_factor(op);
    default:
      return;
  }
}

// An operation that no right program sends.
void Server::reject(const OperationPtr& op, ErrorCode code) {
  const Error error{code, op->rank, op->slice, {}, {}};
  if (sync_) {
    fail(error); // its round can never be complete
  } else {
    if (auto* stream = stream_of(*op)) {
      stream->failed = error;
      peer(op->rank).any_failed = true;
    }
    reply_error(op, error);
  }
  check_barriers();
}

Server::Stream* Server::stream_of(const Operation& op) {
  return peer(op.rank).streams.find(op.slice);
}

} // namespace torchkv::dist

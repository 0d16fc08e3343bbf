#include <algorithm>
#include <limits>
#include <utility>

#include "worker.h"

namespace torchkv::dist {
namespace {

// Numbers that count what happens. No right server comes near the limit, below
// which they can be added to.
bool is_valid_count(int64_t number) {
  return number >= 0 && number < std::numeric_limits<int64_t>::max() / 2;
}

bool is_pull(Kind kind) {
  return kind == Kind::kPull || kind == Kind::kPushPull;
}

} // namespace

void Worker::on_message(const Frame& frame, Time now) {
  now_ = now;
  for (const auto& message : frame) {
    receive(message);
  }
  for (auto& [server, pieces] : got_) {
    Message message;
    message.kind = Kind::kGot;
    message.got = std::move(pieces);
    send_to(server, std::move(message));
  }
  got_.clear();
}

void Worker::receive(const Message& message) {
  const Header& header = message.header;
  if (header.job != config().job || header.store != config().store ||
      header.rank != rank_ || header.inc != inc_ || header.server < 0 ||
      header.server >= config().num_servers ||
      !is_valid_count(header.committed) ||
      !(is_answer(message.kind) || message.kind == Kind::kGot)) {
    return;
  }
  WorkerLink& link = link_of(header.server);
  if (link.state == LinkState::kLost) {
    return;
  }
  if (message.kind == Kind::kWelcome && link.state == LinkState::kHello) {
    greet(message, link);
  } else if (message.kind == Kind::kReject) {
    if (message.error) {
      fail(*message.error);
    }
  } else if (link.state == LinkState::kUp && header.sinc != link.sinc) {
    lose(header.server); // another process answers in its place
  } else if (message.kind == Kind::kExpired) {
    Error error;
    if (sync_) {
      error = {ErrorCode::kWorkerLost, rank_, {}, {}, {}};
    } else {
      const auto code =
          message.by > inc_ ? ErrorCode::kSuperseded : ErrorCode::kExpired;
      error = {code, header.server, {}, {}, {}};
    }
    fail(error);
  } else if (
      (message.kind == Kind::kFatal || message.kind == Kind::kAlive) &&
      message.error) {
    fail(*message.error);
  }
  link.heard = now_;
  link.has_pieces = true; // there may be credit for them now
  committed_ = std::max(committed_, header.committed);
  WorkerOperation* operation = find_answered(message);
  switch (message.kind) {
    case Kind::kGot:
      for (const auto& [opno, index] : message.got) {
        link.queue.ack({opno, index});
        WorkerOperation* sent = find_operation(opno, header.server);
        if (sent != nullptr && index >= 0 && index < sent->request.pieces) {
          sent->got.insert(index);
        }
      }
      break;
    case Kind::kFreed:
      for (const int64_t opno : message.opnos) {
        link.freeing.erase(opno);
      }
      break;
    case Kind::kWait:
      if (operation != nullptr) {
        operation->missing.clear();
        for (const int32_t rank : message.missing) {
          if (rank >= 0 && rank < config().num_workers &&
              operation->missing.size() <
                  static_cast<size_t>(config().num_workers)) {
            operation->missing.push_back(rank);
          }
        }
        for (int32_t i = 0; i < operation->request.pieces; ++i) {
          operation->got.insert(i);
        }
      }
      break;
    case Kind::kValue:
      receive_value(message, operation);
      break;
    case Kind::kDone:
      if (operation != nullptr && !is_pull(operation->request.kind) &&
          is_valid_count(message.version) && is_valid_count(message.kid) &&
          is_valid_count(message.round) && is_valid_count(message.phase)) {
        WorkerAnswer answer;
        answer.result.version = message.version;
        answer.result.kid = message.kid;
        answer.result.round = message.round;
        answer.result.age = message.age;
        answer.phase = message.phase;
        answer.partial = message.partial;
        finish(message.opno, std::move(answer));
      }
      break;
    case Kind::kError:
      if (operation != nullptr && message.error) {
        WorkerAnswer answer;
        answer.result.error = message.error;
        finish(message.opno, std::move(answer));
        if (sync_ && !is_survived(message.error->code)) {
          fail(*message.error);
        }
      }
      break;
    default:
      break;
  }
}

void Worker::greet(const Message& welcome, WorkerLink& link) {
  if (!is_valid_count(welcome.gen) || !is_valid_count(welcome.snap) ||
      !is_valid_count(welcome.phase)) {
    return;
  }
  link.state = LinkState::kUp;
  link.sinc = welcome.header.sinc;
  link.gen = welcome.gen;
  if (welcome.gen > gen_) {
    gen_ = welcome.gen;
    options_ = welcome.payload;
  }
  snap_ = std::max(snap_, welcome.snap);
  phase_ = std::max(phase_, welcome.phase);
  for (const int64_t opno : link.outstanding) {
    transmit(operations_.at(opno));
  }
  complete_config();
}

// Rank 0's predecessor may have been lost before all servers had its last
// options: pushes that are stamped with them would wait for ever.
void Worker::complete_config() {
  if (rank_ != 0 || inc_ == 1 || completed_ || fatal_ || !ready()) {
    return;
  }
  completed_ = true;
  for (int32_t server = 0; server < config().num_servers; ++server) {
    const WorkerLink& link = link_of(server);
    if (link.state == LinkState::kUp && link.gen < gen_) {
      Message request;
      request.kind = Kind::kConfig;
      request.payload = options_;
      issue(0, control_[static_cast<size_t>(server)], std::move(request));
    }
  }
}

WorkerOperation* Worker::find_operation(int64_t opno, int32_t server) {
  const auto at = operations_.find(opno);
  return at == operations_.end() || at->second.table->server != server
      ? nullptr
      : &at->second;
}

// What a message answers, if it does so as it was asked. An answer for a slice
// of a list says that the server has taken the list apart; one for a list that
// is apart here comes again for each slice, when they are asked for.
WorkerOperation* Worker::find_answered(const Message& answer) {
  if (answer.opno <= 0) {
    return nullptr;
  }
  auto at = operations_.upper_bound(answer.opno);
  if (at == operations_.begin()) {
    return nullptr;
  }
  --at;
  const auto& [opno, before] = *at;
  if (before.table->server != answer.header.server) {
    return nullptr;
  }
  if (before.request.list && answer.count == 1 &&
      answer.opno < opno + before.request.count) {
    take_apart(before.table->list.lock(), /*asks=*/false);
    at = operations_.find(answer.opno);
  }
  return at->first == answer.opno && at->second.request.count == answer.count
      ? &at->second
      : nullptr;
}

void Worker::note_got(int32_t server, int64_t opno, int32_t index) {
  for (auto& [to, pieces] : got_) {
    if (to == server) {
      pieces.emplace_back(opno, index);
      return;
    }
  }
  got_.emplace_back(server, Pieces{{opno, index}});
}

void Worker::receive_value(const Message& message, WorkerOperation* operation) {
  if (operation != nullptr && !fits(*operation, message)) {
    return;
  }
  if (message.region) {
    if (operation != nullptr && !operation->lease) {
      operation->lease = {message.kid, message.version, message.round};
      act(CopyOut{message.opno, *message.region});
    }
    return;
  }
  note_got(message.header.server, message.opno, message.index);
  if (operation == nullptr) {
    return;
  }
  operation->pieces.resize(static_cast<size_t>(message.pieces));
  operation->pieces[static_cast<size_t>(message.index)] = message.payload;
  if (message.pieces > 1 && operation->have.insert(message.index)) {
    operation->request.have.push_back(message.index);
  }
  if (message.pieces == 1 ||
      operation->request.have.size() == operation->pieces.size()) {
    WorkerAnswer answer;
    answer.result.pieces = std::move(operation->pieces);
    answer.result.version = message.version;
    answer.result.kid = message.kid;
    answer.result.round = message.round;
    finish(message.opno, std::move(answer));
  }
}

bool Worker::fits(const WorkerOperation& operation, const Message& value)
    const {
  const WorkerTable& table = *operation.table;
  const size_t bytes = operation.answer_bytes.value_or(table.bytes());
  if (!is_pull(operation.request.kind) || !is_valid_count(value.version) ||
      !is_valid_count(value.kid) || !is_valid_count(value.round)) {
    return false;
  }
  if (value.region) {
    return config().leases && !operation.answer_bytes &&
        value.region->size == bytes;
  }
  if (operation.request.list) {
    return value.pieces == 1 && value.index == 0 &&
        value.payload.size() == bytes;
  }
  const int32_t pieces = num_pieces(bytes);
  return value.pieces == pieces && value.index >= 0 && value.index < pieces &&
      value.payload.size() == piece_size(bytes, value.index);
}

void Worker::on_copied(
    int64_t opno,
    const Blob& bytes,
    int64_t kid,
    int64_t version,
    Time now) {
  now_ = now;
  const auto at = operations_.find(opno);
  if (at == operations_.end() || !at->second.lease) {
    return;
  }
  WorkerOperation& operation = at->second;
  const auto lease = operation.lease.value_or(WorkerOperation::Lease());
  if (kid != lease.kid || version != lease.version) {
    // Our session had ended before the last byte was read: asking again tells.
    operation.lease.reset();
    return;
  }
  link_of(operation.table->server).freeing.insert(opno);
  free_leases(operation.table->server);
  WorkerAnswer answer;
  answer.result.pieces.push_back(bytes);
  answer.result.version = lease.version;
  answer.result.kid = lease.kid;
  answer.result.round = lease.round;
  finish(opno, std::move(answer));
}

} // namespace torchkv::dist

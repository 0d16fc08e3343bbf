#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "worker.h"

namespace torchkv::dist {

int32_t Worker::num_pieces(size_t bytes) const {
  const size_t size = config().piece_bytes;
  return static_cast<int32_t>(
      std::max<size_t>(1, (bytes / size) + (bytes % size == 0 ? 0 : 1)));
}

size_t Worker::piece_size(size_t bytes, int32_t index) const {
  const size_t begin = static_cast<size_t>(index) * config().piece_bytes;
  return std::min(bytes - begin, config().piece_bytes);
}

// The payload of a list is one piece.
Blob Worker::piece_of(const WorkerOperation& operation, int32_t index) const {
  const Blob& value = operation.value;
  return operation.request.list
      ? value
      : value.slice(
            static_cast<size_t>(index) * config().piece_bytes,
            piece_size(value.size(), index));
}

// Begins an operation of a call, which may have ended.
WorkerOperation& Worker::issue(
    CallId id,
    const WorkerTablePtr& table,
    Message request,
    std::optional<Blob> payload,
    std::optional<size_t> answer_bytes) {
  const int64_t opno = opno_ + 1;
  opno_ += request.count;
  request.opno = opno;
  request.prev = table->last;
  request.slice = table->slice;
  request.gen = generation();
  request.snap = snap_;
  WorkerOperation& operation =
      operations_.emplace_hint(operations_.end(), opno, WorkerOperation())
          ->second;
  operation.request = std::move(request);
  operation.table = table;
  operation.call = id;
  operation.answer_bytes = answer_bytes;
  if (payload) {
    operation.request.pieces =
        operation.request.list ? 1 : num_pieces(payload->size());
    operation.value = std::move(*payload);
    use_region(operation);
  }
  table->last = opno;
  table->outstanding.push_back(opno);
  link_of(table->server).outstanding.push_back(opno);
  const auto at = calls_.find(id);
  if (at != calls_.end()) {
    WorkerCall& call = at->second;
    call.begun = true;
    ++call.left;
    operation.result = place_result(call, operation);
  }
  transmit(operation);
  return operation;
}

std::optional<size_t> Worker::place_result(
    WorkerCall& call,
    const WorkerOperation& operation) {
  const Kind kind = operation.request.kind;
  if (kind == Kind::kNorm || kind == Kind::kFactor) {
    return std::nullopt;
  }
  const WorkerTable& table = *operation.table;
  if (kind == Kind::kMeet) { // in the place of the server's kEnter
    for (size_t i = 0; i < call.results.size(); ++i) {
      if (call.results[i].server == table.server) {
        return i;
      }
    }
  }
  SliceResult& result = call.results.emplace_back();
  result.slice = table.slice;
  result.server = table.server;
  return call.results.size() - 1;
}

// Moves a push into shared memory, if it may travel there.
void Worker::use_region(WorkerOperation& operation) {
  const Kind kind = operation.request.kind;
  WorkerTable& table = *operation.table;
  const size_t bytes = operation.value.size();
  if (!config().push_regions || !allocate_ || bytes > table.bytes() ||
      (kind != Kind::kPush && kind != Kind::kPushPull)) {
    return;
  }
  if (table.free_regions.empty()) {
    RegionPtr region = allocate_(table.server, table.bytes());
    if (!region) {
      return;
    }
    ++table.num_regions;
    table.free_regions.push_back(std::move(region));
  }
  operation.region = std::move(table.free_regions.front());
  table.free_regions.pop_front();
  operation.request.region = *operation.region;
  operation.request.region->size = bytes;
  operation.request.pieces = 1;
  act(CopyIn{*operation.request.region, std::move(operation.value)});
  operation.value = Blob();
}

// Sends what the server has not confirmed; if it has all, asks what keeps it.
void Worker::transmit(WorkerOperation& operation) {
  operation.sent_at = now_;
  WorkerLink& link = link_of(operation.table->server);
  if (link.state != LinkState::kUp) {
    return;
  }
  const Message& request = operation.request;
  bool has_all = true; // pieces
  for (int32_t i = 0; i < request.pieces; ++i) {
    if (!operation.got.contains(i)) {
      has_all = false;
      const size_t bytes = operation.region ? 0 : piece_of(operation, i).size();
      link.queue.put({request.opno, i}, bytes, request.priority);
      link.has_pieces = true;
    }
  }
  if (has_all) {
    send_operation(operation, -1, 0);
  }
}

void Worker::send_operation(
    const WorkerOperation& operation,
    int32_t index,
    int64_t frame) {
  Message message = operation.request;
  message.index = index;
  message.frame = frame;
  message.acked = operation.table->outstanding.front();
  if (index < 0) {
    message.region.reset();
  } else if (!operation.region) {
    message.payload = piece_of(operation, index);
  }
  send_to(operation.table->server, std::move(message));
}

void Worker::pump(int32_t server) {
  WorkerLink& link = link_of(server);
  while (link.state == LinkState::kUp) {
    const auto batch = link.queue.pop(config(), now_);
    if (batch.pieces.empty()) {
      return;
    }
    for (const auto& [opno, index] : batch.pieces) {
      const auto at = operations_.find(opno);
      if (at == operations_.end() || at->second.got.contains(index)) {
        link.queue.ack({opno, index});
      } else {
        at->second.sent_at = now_;
        send_operation(at->second, index, batch.frame);
      }
    }
  }
}

void Worker::send_to(int32_t server, Message message) {
  const WorkerLink& link = link_of(server);
  Header& header = message.header;
  header.job = config().job;
  header.store = config().store;
  header.rank = rank_;
  header.server = server;
  header.inc = inc_;
  header.sinc = link.sinc;
  header.committed = committed_;
  header.floor =
      link.outstanding.empty() ? opno_ + 1 : link.outstanding.front();
  header.phase = phase_;
  header.digest = config().digest;
  send({Address::Role::kServer, server}, std::move(message));
}

void Worker::beat(int32_t server) {
  Message message;
  if (link_of(server).state == LinkState::kHello) {
    message.kind = Kind::kHello;
  } else {
    message.kind = Kind::kHeartbeat;
    if (sync_) {
      message.error = fatal_;
    }
  }
  send_to(server, std::move(message));
}

void Worker::free_leases(int32_t server) {
  WorkerLink& link = link_of(server);
  link.freed_at = now_;
  Message message;
  message.kind = Kind::kFree;
  message.opnos.assign(link.freeing.begin(), link.freeing.end());
  send_to(server, std::move(message));
}

// An operation has ended. Ends its call, if that was all it waited for.
void Worker::finish(int64_t opno, WorkerAnswer answer) {
  const auto node = operations_.extract(opno);
  WorkerOperation& operation = node.mapped();
  WorkerTable& table = *operation.table;
  auto& of_table = table.outstanding;
  of_table.erase(std::lower_bound(of_table.begin(), of_table.end(), opno));
  auto& of_link = link_of(table.server).outstanding;
  of_link.erase(std::lower_bound(of_link.begin(), of_link.end(), opno));
  SliceResult& result = answer.result;
  if (result.error) {
    result.error->servers = {table.server};
    if (result.error->slice == table.slice) {
      result.error->round = operation.request.round;
    }
  }
  const std::optional<Error> error = result.error;
  if (operation.region) {
    // Who seems lost may still be reading.
    if (error && error->code == ErrorCode::kServerLost) {
      abandoned_.push_back(std::move(operation.region));
    } else {
      table.free_regions.push_back(std::move(operation.region));
    }
  }
  if (!error) {
    switch (operation.request.kind) {
      case Kind::kInit:
        table.ready = true;
        table.kid = result.kid;
        table.round = result.round;
        table.base = result.version;
        break;
      case Kind::kPush:
        table.known = std::max(table.known, result.version);
        break;
      case Kind::kNorm:
        measured(operation.step, operation.part, answer.partial);
        break;
      case Kind::kMeet:
        phase_ = std::max(phase_, answer.phase);
        break;
      case Kind::kPull:
      case Kind::kPushPull:
        table.base = std::max(table.base, result.version);
        break;
      default:
        break;
    }
  }
  if (operation.request.kind == Kind::kDelete) {
    forget(table.slice.key);
  }
  const auto at = calls_.find(operation.call);
  if (at != calls_.end()) {
    WorkerCall& call = at->second;
    --call.left;
    const bool thrown = error && error->code == ErrorCode::kUpdater;
    if (operation.result) {
      if (thrown && (!call.thrown || *error < *call.thrown)) {
        call.thrown = error;
      }
      result.slice = table.slice;
      result.server = table.server;
      SliceResult& place = call.results[*operation.result];
      (operation.list_part ? place.parts[*operation.list_part] : place) =
          std::move(result);
    }
    if (error && !thrown) {
      end(at->first, error); // at once: other slices may wait for ever
    } else if (call.left == 0 && call.thrown) {
      // All have answered: every rank names the same slice.
      end(at->first, call.thrown);
    } else if (call.left == 0) {
      complete(at->first, call);
    }
  }
  begin_stalled();
  begin_deletes();
  close_if_idle();
}

// Forgets a key when all servers have answered its delete: until then, an init
// goes on with its streams.
void Worker::forget(const Key& key) {
  const WorkerKey* state = keys_.find(key);
  if (state != nullptr && state->deleted &&
      std::none_of(
          state->tables.begin(), state->tables.end(), [&](const auto& table) {
            return operations_.count(table->last) != 0;
          })) {
    keys_.erase(key);
  }
}

// The norm of one slice of a step is known; the last one decides for all.
void Worker::measured(
    const std::shared_ptr<WorkerStep>& step,
    size_t part,
    double partial) {
  step->parts[part].partial = partial;
  if (++step->num_measured < step->parts.size()) {
    return;
  }
  // In the order of the slices: the same bits in every run.
  std::vector<size_t> order(step->parts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return step->parts[a].table->slice < step->parts[b].table->slice;
  });
  double total = 0;
  for (const size_t i : order) {
    total += step->parts[i].partial;
  }
  const double factor = step->factor(total);
  for (const auto& member : step->parts) {
    Message request;
    request.kind = Kind::kFactor;
    request.round = member.round;
    request.factor = std::isfinite(factor) ? factor : 0;
    issue(step->call, member.table, std::move(request));
  }
}

} // namespace torchkv::dist

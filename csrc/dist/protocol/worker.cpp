#include "worker.h"

#include <algorithm>
#include <utility>

namespace torchkv::dist {
Worker::Worker(
    int32_t rank,
    int64_t inc,
    const Config& config,
    Time now,
    AllocateRegion allocate)
    : Core(config, now),
      rank_(rank),
      inc_(inc),
      sync_(config.policy.is_sync()),
      allocate_(std::move(allocate)),
      now_(now),
      links_(static_cast<size_t>(config.num_servers)) {
  for (int32_t server = 0; server < config.num_servers; ++server) {
    link_of(server).heard = now;
    auto table = std::make_shared<WorkerTable>();
    table->server = server;
    control_.push_back(std::move(table));
  }
}

Worker::~Worker() = default;

bool Worker::ready() const {
  return fatal_ ||
      std::none_of(links_.begin(), links_.end(), [](const WorkerLink& link) {
           return link.state == LinkState::kHello;
         });
}

std::optional<int64_t> Worker::version(const SliceId& slice) const {
  const WorkerKey* key = keys_.find(slice.key);
  if (key == nullptr || slice.index < 0 ||
      static_cast<size_t>(slice.index) >= key->tables.size()) {
    return std::nullopt;
  }
  const auto& table = *key->tables[static_cast<size_t>(slice.index)];
  const auto& current = table.current();
  return table.ready ? std::optional(std::max(current.base, current.known))
                     : std::nullopt;
}

void Worker::flush() {
  for (int32_t server = 0; server < config().num_servers; ++server) {
    if (std::exchange(link_of(server).has_pieces, false)) {
      pump(server);
    }
  }
}

// Time.

void Worker::on_timer(Time now) {
  now_ = now;
  const Time stopped = tick(now);
  if (stopped > 0) {
    for (auto& link : links_) {
      link.heard = std::min(now, link.heard + stopped);
    }
  }
  for (auto& [id, call] : calls_) {
    call.deadline += stopped;
  }
  for (int32_t server = 0; server < config().num_servers; ++server) {
    WorkerLink& link = link_of(server);
    const Time limit =
        link.state == LinkState::kUp ? config().lost : config().join;
    if (link.state == LinkState::kLost) {
      continue;
    }
    if (now - link.heard > limit) {
      lose(server);
    } else if (now - link.beat >= config().heartbeat) {
      link.beat = now;
      beat(server);
    }
  }
  for (auto& [opno, operation] : operations_) {
    if (now - operation.sent_at >= config().retry) {
      transmit(operation);
    }
  }
  for (int32_t server = 0; server < config().num_servers; ++server) {
    WorkerLink& link = link_of(server);
    link.has_pieces = true;
    if (!link.freeing.empty() && link.state == LinkState::kUp &&
        now - link.freed_at >= config().retry) {
      free_leases(server);
    }
  }
  std::vector<CallId> late;
  for (const auto& [id, call] : calls_) {
    if (now >= call.deadline) {
      late.push_back(id);
    }
  }
  for (const CallId id : late) {
    if (calls_.count(id) != 0) { // may have ended with another
      time_out(id);
    }
  }
  begin_deletes();
}

void Worker::time_out(CallId id) {
  if (deleting_.count(id) != 0) { // it waits for operations on its keys
    take_apart_items(calls_.at(id).request);
  }
  take_apart_lists([&](const WorkerTable& table) {
    const auto& opnos = table.outstanding;
    return std::any_of(opnos.begin(), opnos.end(), [&](int64_t opno) {
      return operations_.at(opno).call == id;
    });
  });
  Error error;
  error.code = ErrorCode::kTimeout;
  bool is_first = true;
  for (const auto& [opno, operation] : operations_) {
    if (!is_awaited(operation, id)) {
      continue;
    }
    if (is_first && !operation.table->slice.is_server()) {
      error.slice = operation.table->slice;
      error.round = operation.request.round;
    }
    error.servers.push_back(operation.table->server);
    is_first = false;
    error.missing.insert(
        error.missing.end(),
        operation.missing.begin(),
        operation.missing.end());
  }
  for (auto* const ranks : {&error.missing, &error.servers}) {
    std::sort(ranks->begin(), ranks->end());
    ranks->erase(std::unique(ranks->begin(), ranks->end()), ranks->end());
  }
  end(id, std::move(error));
}

// Whether a call waits for this operation.
bool Worker::is_awaited(const WorkerOperation& operation, CallId id) const {
  if (stalled_ == id) { // for those that have the memory
    return operation.region != nullptr;
  }
  if (deleting_.count(id) == 0) {
    return operation.call == id;
  }
  const SliceId& slice = operation.table->slice;
  const auto& items = calls_.at(id).request.items;
  return !slice.is_server() &&
      std::any_of(items.begin(), items.end(), [&](const auto& item) {
        return item.key == slice.key;
      });
}

// Ends of calls.

void Worker::withdraw(CallId id, Time now) {
  now_ = now;
  const auto at = calls_.find(id);
  if (at != calls_.end() && !at->second.begun) {
    time_out(id);
  }
}

// All operations of a call have been answered.
void Worker::complete(CallId id, WorkerCall& call) {
  switch (call.request.kind) {
    case Request::Kind::kBarrier:
      if (!call.met) {
        meet(id, call);
        return;
      }
      break;
    case Request::Kind::kConfig:
      committed_ = std::max(committed_, call.number);
      break;
    case Request::Kind::kSnapshot: // every shard is on disk: now it counts
      write_manifest(call);
      return;
    case Request::Kind::kClose:
      for (int32_t server = 0; server < config().num_servers; ++server) {
        Message message;
        message.kind = Kind::kBye;
        send_to(server, std::move(message));
      }
      break;
    default:
      break;
  }
  end(id,
      std::nullopt,
      call.has_parts ? flat(std::move(call.results)) : std::move(call.results));
}

void Worker::write_manifest(const WorkerCall& call) {
  Manifest manifest;
  manifest.number = call.number;
  manifest.job = config().job;
  manifest.step = call.request.step;
  manifest.num_servers = config().num_servers;
  manifest.keys = call.keys;
  act(WriteManifest{std::move(manifest)});
}

void Worker::on_written(
    int64_t snapshot,
    const std::optional<std::string>& error,
    Time now) {
  now_ = now;
  std::vector<CallId> ids;
  for (const auto& [id, call] : calls_) {
    if (call.request.kind == Request::Kind::kSnapshot &&
        call.number == snapshot) {
      ids.push_back(id);
    }
  }
  for (const CallId id : ids) {
    end(id,
        error ? std::optional(Error{ErrorCode::kWrite, rank_, {}, *error, {}})
              : std::nullopt);
  }
}

void Worker::end(
    CallId id,
    std::optional<Error> error,
    std::vector<SliceResult> results) {
  if (stalled_ == id) {
    stalled_ = 0;
  }
  const auto at = calls_.find(id);
  if (at == calls_.end()) {
    return;
  }
  const bool begun = at->second.begun;
  calls_.erase(at);
  act(Return{id, std::move(error), std::move(results), begun});
  if (closing_ != 0) {
    close_if_idle();
  }
}

// Failures.

void Worker::on_peer_lost(int32_t server, Time now) {
  now_ = now;
  if (server >= 0 && server < config().num_servers &&
      link_of(server).state == LinkState::kUp) {
    lose(server);
  }
}

void Worker::lose(int32_t server) {
  WorkerLink& link = link_of(server);
  link.state = LinkState::kLost;
  if (sync_ && closing_ == 0) {
    fail({ErrorCode::kServerLost, server, {}, {}, {}});
    return;
  }
  take_apart_lists(
      [&](const WorkerTable& table) { return table.server == server; });
  const std::vector<int64_t> opnos(
      link.outstanding.begin(), link.outstanding.end());
  for (const int64_t opno : opnos) {
    const auto at = operations_.find(opno);
    if (at == operations_.end()) {
      continue;
    }
    const Kind kind = at->second.request.kind;
    WorkerAnswer answer;
    // The other servers carry on with what all of them do.
    if (kind != Kind::kClose && kind != Kind::kEnter && kind != Kind::kConfig) {
      const SliceId& slice = at->second.table->slice;
      Error error{ErrorCode::kServerLost, server, {}, {}, {}};
      if (!slice.is_server()) {
        error.slice = slice;
      }
      answer.result.error = std::move(error);
    }
    finish(opno, std::move(answer));
  }
  complete_config();
}

void Worker::fail(const Error& error) {
  if (fatal_) {
    return;
  }
  fatal_ = error;
  for (int32_t server = 0; server < config().num_servers; ++server) {
    if (link_of(server).state != LinkState::kHello) {
      beat(server); // the others should hear of the cause, not of us
    }
  }
  std::vector<CallId> ids;
  for (const auto& [id, call] : calls_) {
    ids.push_back(id);
  }
  for (const CallId id : ids) {
    end(id, error);
  }
}

} // namespace torchkv::dist

#include <algorithm>
#include <utility>

#include "worker.h"

namespace torchkv::dist {
namespace {

bool is_push(Request::Kind kind) {
  return kind == Request::Kind::kPush || kind == Request::Kind::kPushPull;
}

Kind operation_kind(Request::Kind kind) {
  switch (kind) {
    case Request::Kind::kPush:
      return Kind::kPush;
    case Request::Kind::kPushPull:
      return Kind::kPushPull;
    case Request::Kind::kDelete:
      return Kind::kDelete;
    default:
      return Kind::kPull;
  }
}

} // namespace

CallId Worker::call(Request request, Time now, Time timeout) {
  now_ = now;
  const CallId id = ++last_call_;
  WorkerCall& call = calls_[id];
  call.request = std::move(request);
  call.deadline = now + timeout;
  if (fatal_) {
    end(id, fatal_);
  } else if (!has_room(call.request)) {
    stalled_ = id; // the caller waits: later calls must not overtake this one
  } else {
    begin(id, call);
  }
  return id;
}

// With dist_async a push may wait for a region: nobody's program can keep it.
// In other modes a region is added: ranks that push in different orders would
// wait for each other for ever.
bool Worker::has_room(const Request& request) const {
  const Policy& policy = config().policy;
  if (!is_push(request.kind) || !config().push_regions || policy.quorum != 1 ||
      policy.staleness || refusal(request)) {
    return true;
  }
  for (const auto& item : request.items) {
    for (const auto& table : keys_.find(item.key)->tables) {
      if (table->free_regions.empty() &&
          table->num_regions >= config().regions) {
        return false;
      }
    }
  }
  return true;
}

void Worker::begin_stalled() {
  const auto at = calls_.find(stalled_);
  if (at != calls_.end() && has_room(at->second.request)) {
    stalled_ = 0;
    begin(at->first, at->second);
  }
}

void Worker::begin(CallId id, WorkerCall& call) {
  switch (call.request.kind) {
    case Request::Kind::kInit:
    case Request::Kind::kPush:
    case Request::Kind::kPushPull:
    case Request::Kind::kPull:
    case Request::Kind::kDelete:
      begin_items(id, call);
      break;
    case Request::Kind::kConfig:
      begin_config(id, call);
      break;
    case Request::Kind::kBarrier:
      if (sync_ || link_of(0).state == LinkState::kLost) {
        meet(id, call);
      } else {
        Message request;
        request.kind = Kind::kEnter;
        everywhere(id, call, request);
      }
      break;
    case Request::Kind::kSnapshot:
      begin_snapshot(id, call);
      break;
    case Request::Kind::kClose:
      closing_ = id;
      close_if_idle();
      break;
  }
}

// All is checked before anything is sent.
void Worker::begin_items(CallId id, WorkerCall& call) {
  const Request& request = call.request;
  if (request.kind == Request::Kind::kInit) {
    for (const auto& item : request.items) {
      // If a server is lost, the key is remembered as such.
      WorkerKey& key = keys_[item.key];
      key.spec = item.spec;
      key.deleted = false;
      key.places = place(
          item.key, item.spec, config().num_servers, config().split_bytes);
    }
  }
  const auto error = refusal(request);
  if (error) {
    end(id, error);
    return;
  }
  if (request.kind == Request::Kind::kDelete && has_calls(request)) {
    deleting_.insert(id);
    return;
  }
  if (request.items.empty()) {
    complete(id, call);
  } else if (request.kind == Request::Kind::kInit) {
    issue_inits(id, call);
  } else {
    issue_values(id, call);
  }
}

// Whether a call has operations on these keys. A delete waits for them: the
// server forgets what a rank that leaves has asked for.
bool Worker::has_calls(const Request& request) const {
  for (const auto& item : request.items) {
    for (const auto& table : keys_.find(item.key)->tables) {
      for (const int64_t opno : table->outstanding) {
        if (calls_.count(operations_.at(opno).call) != 0) {
          return true;
        }
      }
    }
  }
  return false;
}

void Worker::begin_deletes() {
  const auto ids = std::exchange(deleting_, {});
  for (const CallId id : ids) {
    const auto at = calls_.find(id);
    if (at != calls_.end()) {
      begin_items(id, at->second);
    }
  }
}

std::optional<Error> Worker::refusal(const Request& request) const {
  const bool has_value = is_push(request.kind) ||
      (request.kind == Request::Kind::kInit && rank_ == 0);
  for (const auto& item : request.items) {
    const WorkerKey* key = keys_.find(item.key);
    if (key == nullptr || key->deleted) {
      return Error{ErrorCode::kUnknown, rank_, SliceId{item.key, 0}, {}, {}};
    }
    for (const auto& at : key->places) {
      if (link_of(at.server).state == LinkState::kLost) {
        const SliceId slice{item.key, at.index};
        return Error{ErrorCode::kServerLost, at.server, slice, {}, {}};
      }
    }
    if ((has_value && !key->is_value(item)) || !key->are_queries(item)) {
      return Error{ErrorCode::kShape, rank_, SliceId{item.key, 0}, {}, {}};
    }
  }
  return std::nullopt;
}

// That of an earlier init or delete of the same slice, whose call has timed
// out: the stream goes on, and the server may still answer.
WorkerTablePtr Worker::table_for(
    const std::vector<WorkerTablePtr>& before,
    const Request::Item& item,
    const Place& at) {
  auto table = std::make_shared<WorkerTable>();
  table->slice = {item.key, at.index};
  table->server = at.server;
  table->begin = static_cast<size_t>(at.begin);
  table->end = static_cast<size_t>(at.end);
  table->item_bytes = static_cast<size_t>(item.spec.item_bytes);
  for (const auto& old : before) {
    if (old->slice == table->slice && old->server == table->server) {
      if (old->begin == table->begin && old->end == table->end &&
          old->item_bytes == table->item_bytes) {
        old->ready = false;
        old->base = old->known = 0;
        return old;
      }
      table->last = old->last; // the server refuses one of the two
    }
  }
  return table;
}

void Worker::issue_inits(CallId id, WorkerCall& call) {
  for (auto& item : call.request.items) {
    WorkerKey& key = *keys_.find(item.key);
    const auto before = std::exchange(key.tables, {});
    auto codes = item.codes.begin();
    for (const auto& at : key.places) {
      const auto& table = key.tables.emplace_back(table_for(before, item, at));
      Message request;
      request.kind = Kind::kInit;
      request.spec = item.spec;
      request.priority = item.priority;
      std::optional<Blob> value;
      if (rank_ == 0 && item.codes.empty()) {
        value = table->part_of(item.value, table->item_bytes);
      } else if (rank_ == 0) {
        value = std::move(*codes++);
      }
      issue(id, table, std::move(request), std::move(value));
    }
    item.drop_payloads();
  }
}

void Worker::issue_values(CallId id, WorkerCall& call) {
  const bool pushes = is_push(call.request.kind);
  const auto group = group_of(call.request);
  std::shared_ptr<WorkerStep> step;
  if (group && rank_ == 0) {
    step = std::make_shared<WorkerStep>();
    step->call = id;
    step->factor = std::move(call.request.factor);
  }
  call.results.reserve(call.request.items.size());
  for (auto& item : call.request.items) {
    WorkerKey& key = *keys_.find(item.key);
    key.deleted = call.request.kind == Request::Kind::kDelete;
    auto codes = item.codes.begin();
    auto query = item.queries.begin();
    for (const auto& table : key.tables) {
      Message request;
      request.kind = operation_kind(call.request.kind);
      request.priority = item.priority;
      std::optional<Blob> payload;
      std::optional<size_t> answer_bytes;
      if (pushes) {
        ++table->round;
        request.base = table->base;
        request.total = key.spec.total;
        request.dtype = item.dtype;
        request.item_bytes = item.item_bytes;
        request.group = group;
        request.is_encoded = !item.codes.empty();
        const bool is_own = item.own.size() != 0 && table->server == rank_;
        const Blob& value = is_own ? item.own : item.value;
        payload = request.is_encoded
            ? std::move(*codes++)
            : table->part_of(value, key.item_bytes(item));
      } else {
        request.min_version = item.min_version;
        if (!item.queries.empty()) {
          answer_bytes = query->answer_bytes;
          payload = std::move((query++)->payload);
        }
      }
      request.round = table->round;
      if (step) {
        step->parts.push_back({table, table->round, 0});
      }
      issue(id, table, std::move(request), std::move(payload), answer_bytes);
    }
    item.drop_payloads();
  }
  for (size_t i = 0; step && i < step->parts.size(); ++i) {
    Message request;
    request.kind = Kind::kNorm;
    request.round = step->parts[i].round;
    request.group = group;
    WorkerOperation& norm = issue(id, step->parts[i].table, std::move(request));
    norm.step = step;
    norm.part = i;
  }
}

// The least slice's next round: the same on all ranks, without agreement.
std::optional<Group> Worker::group_of(const Request& request) const {
  std::optional<Group> group;
  if (!request.two_phase || !is_push(request.kind)) {
    return group;
  }
  for (const auto& item : request.items) {
    for (const auto& table : keys_.find(item.key)->tables) {
      if (!group || table->slice < group->slice) {
        group = {table->slice, table->kid, table->round + 1};
      }
    }
  }
  return group;
}

// An operation on every server that is not lost: nothing of ours is under way
// on a lost one.
void Worker::everywhere(CallId id, WorkerCall& call, const Message& request) {
  bool any = false;
  for (int32_t server = 0; server < config().num_servers; ++server) {
    if (link_of(server).state != LinkState::kLost) {
      any = true;
      Message copy = request;
      if (copy.kind != Kind::kConfig) {
        copy.counts = counts(server);
      }
      issue(id, control_[static_cast<size_t>(server)], std::move(copy));
    }
  }
  if (!any) {
    complete(id, call);
  }
}

// The pushes of each slice on `server`, or on any.
Counts Worker::counts(std::optional<int32_t> server) const {
  Counts result;
  for (const auto& [key, state] : keys_) {
    for (const auto& table : state.tables) {
      if (table->ready && !state.deleted &&
          (!server || table->server == *server)) {
        result.emplace_back(table->slice, table->round);
      }
    }
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) {
    return a.first < b.first;
  });
  return result;
}

// Not waited for: what is pushed from now on has the number.
void Worker::begin_config(CallId id, WorkerCall& call) {
  Message request;
  request.kind = Kind::kConfig;
  request.payload = call.request.options;
  request.retire = gen_;
  bool is_first = true;
  for (const auto& [opno, operation] : operations_) {
    const int64_t gen = operation.request.gen;
    request.retire = is_first ? gen : std::min(request.retire, gen);
    is_first = false;
  }
  call.number = ++gen_;
  everywhere(id, call, request);
}

void Worker::begin_snapshot(CallId id, WorkerCall& call) {
  for (int32_t server = 0; server < config().num_servers; ++server) {
    if (link_of(server).state == LinkState::kLost) {
      end(id, Error{ErrorCode::kServerLost, server, {}, {}, {}});
      return;
    }
  }
  call.number = ++snap_;
  for (const auto& [key, state] : keys_) {
    if (!state.deleted) {
      call.keys.emplace_back(key, state.spec);
    }
  }
  Message request;
  request.kind = Kind::kSnapshot;
  request.step = call.request.step;
  everywhere(id, call, request);
}

// Server 0 alone decides who meets whom.
void Worker::meet(CallId id, WorkerCall& call) {
  call.met = true;
  if (link_of(0).state == LinkState::kLost) {
    end(id, Error{ErrorCode::kServerLost, 0, {}, {}, {}});
    return;
  }
  Message request;
  request.kind = Kind::kMeet;
  request.counts = counts(std::nullopt);
  issue(id, control_[0], std::move(request));
}

// Calls must have ended before anybody hears that we go; operations of calls
// that have ended need not.
void Worker::close_if_idle() {
  const auto at = calls_.find(closing_);
  if (at != calls_.end() && !at->second.begun && calls_.size() == 1) {
    Message request;
    request.kind = Kind::kClose;
    everywhere(at->first, at->second, request);
  }
}

} // namespace torchkv::dist

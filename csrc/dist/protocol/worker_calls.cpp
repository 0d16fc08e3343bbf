#include <algorithm>
#include <utility>

#include "worker.h"

namespace torchkv::dist {

CallId Worker::call(Request request, Time now, Time timeout) {
  now_ = now;
  const CallId id = ++last_call_;
  WorkerCall& call = calls_[id];
  call.request = std::move(request);
  call.deadline = now + timeout;
  if (config().push_regions) {
    take_apart_items(call.request);
  }
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
  take_apart_items(call.request);
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
    if (item.list) {
      continue; // joined: nothing to refuse
    }
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
        result.emplace_back(table->slice, table->current().round);
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

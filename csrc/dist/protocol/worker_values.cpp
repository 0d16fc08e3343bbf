// What calls on keys send.
#include <algorithm>
#include <utility>

#include "worker.h"

namespace torchkv::dist {
namespace {

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
    if (item.list) {
      issue_list(id, call.request.kind, item);
      continue;
    }
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

// REQUIRES: a list that is joined.
void Worker::issue_list(CallId id, Request::Kind kind, Request::Item& item) {
  const WorkerListPtr joined = join(item.list);
  const WorkerTablePtr& table = joined->table;
  Message request;
  request.prevs = std::exchange(joined->lasts, {});
  request.kind = operation_kind(kind);
  request.list = std::move(item.list);
  request.count = static_cast<int32_t>(request.list->size());
  request.priority = item.priority;
  std::optional<Blob> payload;
  if (is_push(kind)) {
    ++table->round;
    request.base = table->base;
    request.total = request.list->num_elements();
    request.dtype = item.dtype;
    request.item_bytes = item.item_bytes;
    payload = std::move(item.value);
  } else {
    request.min_version = item.min_version;
  }
  request.round = table->round;
  issue(id, table, std::move(request), std::move(payload));
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

} // namespace torchkv::dist

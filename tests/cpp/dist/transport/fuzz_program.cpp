// The programs of a FuzzSession's workers.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "fuzz_session.h"

namespace torchkv::dist {

Config FuzzSession::make_config(RandomFrames& random) {
  Config config;
  config.job = 7;
  config.store = random.bits();
  config.num_workers = random.from(1, 4);
  config.num_servers = random.from(1, 4);
  if (!random.chance(3)) {
    config.policy.quorum = random.from(1, config.num_workers + 1);
    config.policy.grace = random.chance(2) ? 0 : 0.01;
    config.policy.patience = 0.1;
    if (random.chance(3)) {
      config.policy.staleness = random.from(0, 3);
    }
  }
  config.digest = random.bits();
  config.push_regions = random.chance(3);
  config.leases = random.chance(3);
  config.heartbeat = 0.1;
  config.lost = 0.5;
  config.join = 5;
  config.retry = 0.06;
  config.piece_bytes = random.chance(4) ? 6000 : 64;
  config.frame_bytes = random.chance(2) ? 256 : 20000;
  config.frame_pieces = 8;
  config.split_bytes = 200;
  return config;
}

Request::Item FuzzSession::make_item(int64_t key) {
  Request::Item item;
  item.key = key == 2 ? Key("weight") : Key(key);
  item.spec = specs_.at(key);
  if (item.spec.is_row_sparse()) { // payloads of any size
    for (const Place& slice : places_of(item.key, item.spec)) {
      static_cast<void>(slice);
      item.codes.push_back(random_.bytes(random_.from(1, 300)));
      item.queries.push_back({random_.bytes(kQueryBytes), kQueryBytes});
    }
  } else {
    item.value = random_.bytes(
        static_cast<size_t>(item.spec.total * item.spec.item_bytes));
  }
  item.priority = random_.from(-2, 3);
  return item;
}

Request FuzzSession::make_request() {
  static const std::vector<Request::Kind> kinds = {
      Request::Kind::kPush,
      Request::Kind::kPush,
      Request::Kind::kPushPull,
      Request::Kind::kPull,
      Request::Kind::kConfig,
      Request::Kind::kBarrier,
      Request::Kind::kSnapshot};
  Request request(kinds[random_.below(kinds.size())]);
  if (request.kind == Request::Kind::kConfig) {
    request.options = random_.bytes(random_.chance(8) ? 5000 : 10);
  }
  if (request.kind == Request::Kind::kPush ||
      request.kind == Request::Kind::kPushPull ||
      request.kind == Request::Kind::kPull) {
    const int64_t first = random_.from(0, 3);
    const int64_t end = random_.chance(2) ? first + 1 : 3;
    for (int64_t key = first; key < end; ++key) {
      request.items.push_back(make_item(key));
      if (specs_.at(key).is_row_sparse() &&
          request.kind == Request::Kind::kPushPull) {
        request.kind = Request::Kind::kPush; // no driver asks for all rows
      }
    }
  }
  if ((request.kind == Request::Kind::kPush ||
       request.kind == Request::Kind::kPushPull) &&
      config_.policy.is_sync() && random_.chance(3)) {
    request.two_phase = true;
    request.factor = [](double total) { return total / 8; };
  }
  if (random_.chance(2)) {
    join(request);
  }
  return request;
}

// Names keys together that may be.
void FuzzSession::join(Request& request) {
  std::vector<Request::Item> items;
  std::map<int32_t, std::vector<Request::Item>> by_server;
  for (auto& item : request.items) {
    const auto places = places_of(item.key, item.spec);
    const bool is_small = places.size() == 1 && !item.spec.is_row_sparse() &&
        item.value.size() <= config_.piece_bytes;
    (is_small ? by_server[places[0].server] : items).push_back(std::move(item));
  }
  for (auto& [server, of_server] : by_server) {
    if (of_server.size() == 1) {
      items.push_back(std::move(of_server[0]));
      continue;
    }
    Request::Item joined = of_server[0];
    std::vector<SliceList::Part> parts;
    size_t num_bytes = 0;
    for (const auto& item : of_server) {
      parts.push_back({item.key, item.spec.total});
      num_bytes += item.value.size();
    }
    joined.list = std::make_shared<const SliceList>(std::move(parts));
    joined.item_bytes = joined.spec.item_bytes;
    joined.value = random_.bytes(num_bytes);
    lists_.push_back(joined.list);
    items.push_back(std::move(joined));
  }
  request.items = std::move(items);
}

// What each worker's program does.
void FuzzSession::make_requests() {
  const auto add = [&](Request::Kind kind, int64_t key) {
    requests_.emplace_back(kind).items.push_back(make_item(key));
  };
  for (int64_t key = 0; key < 3; ++key) {
    const int64_t total = random_.chance(2)
        ? random_.from(1, 17)
        : random_.from(1, random_.chance(8) ? 3000 : 120);
    specs_[key] = KeySpec{total, 6, 4, random_.chance(4), {total}, {}};
    // The core's shared memory is for elements.
    const bool has_regions = config_.push_regions || config_.leases;
    if (key == 1 && !has_regions && random_.chance(2)) {
      specs_[key].total = 0;
      specs_[key].sizes.push_back(3);
      specs_[key].row_init = RowInit();
    }
    add(Request::Kind::kInit, key);
  }
  for (int part = 0; part < 2; ++part) {
    const int num_calls = random_.from(1, 15);
    for (int i = 0; i < num_calls; ++i) {
      requests_.push_back(make_request());
    }
    if (part == 0 && random_.chance(2)) {
      add(Request::Kind::kDelete, 1);
      add(Request::Kind::kInit, 1);
    }
  }
  requests_.emplace_back(Request::Kind::kClose);
}

// An init, a delete and a barrier are waited for, the rest is not.
bool FuzzSession::may_begin(const Program& program, const Request& request) {
  const auto waits = [](Request::Kind kind) {
    return kind == Request::Kind::kInit || kind == Request::Kind::kDelete ||
        kind == Request::Kind::kBarrier || kind == Request::Kind::kClose;
  };
  if (program.calls.empty()) {
    return true;
  }
  return program.calls.size() < 3 &&
      (request.kind == Request::Kind::kBarrier || !waits(request.kind)) &&
      std::none_of(
             program.calls.begin(),
             program.calls.end(),
             [&](const auto& call) { return waits(call.second); });
}

// As another program might have it.
Request FuzzSession::altered(const Request& request) {
  Request result = request;
  if (result.kind == Request::Kind::kInit && random_.chance(8)) {
    result.items[0].spec.dtype = 7;
  } else if (
      result.kind == Request::Kind::kInit &&
      result.items[0].spec.is_row_sparse() && random_.chance(2)) {
    result.items[0].spec.row_init->seed = 5;
  } else if (result.kind == Request::Kind::kPush && random_.chance(4)) {
    result.items.resize(1, result.items[0]);
  } else if (result.kind == Request::Kind::kPull && random_.chance(4)) {
    result.items[0].min_version = random_.from(0, 4);
  }
  return result;
}

} // namespace torchkv::dist

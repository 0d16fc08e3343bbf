// A worker that a test drives by hand, in the servers' and the driver's place.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "dist/protocol/worker.h"

namespace torchkv::dist {

constexpr int64_t kJob = 3;
constexpr uint64_t kStore = 5;
constexpr int64_t kInc = 2;

inline Config test_config(int32_t num_servers, std::optional<int32_t> quorum) {
  Config config;
  config.job = kJob;
  config.store = kStore;
  config.num_workers = 4;
  config.num_servers = num_servers;
  config.policy.quorum = quorum;
  config.digest = 99;
  config.piece_bytes = 16;
  config.split_bytes = 1 << 20;
  return config;
}

inline Blob bytes(size_t size, uint8_t first = 0) {
  auto data = std::make_shared<std::vector<uint8_t>>(size);
  for (size_t i = 0; i < size; ++i) {
    (*data)[i] = static_cast<uint8_t>(first + i);
  }
  const void* at = data->data();
  return {std::move(data), at, size};
}

inline KeySpec floats(int64_t total) {
  KeySpec spec;
  spec.total = total;
  spec.item_bytes = 4;
  return spec;
}

inline Request request(
    Request::Kind kind,
    const std::vector<Key>& keys = {},
    int64_t total = 2) {
  Request result;
  result.kind = kind;
  for (const auto& key : keys) {
    Request::Item item;
    item.key = key;
    item.spec = floats(total);
    item.value = bytes(static_cast<size_t>(total) * 4);
    result.items.push_back(std::move(item));
  }
  return result;
}

// Of a call that must have failed.
inline Error error_in(const Return& end) {
  EXPECT_TRUE(end.error);
  return std::optional<Error>(end.error).value_or(Error());
}

struct WorkerScene {
  explicit WorkerScene(
      const Config& with,
      int32_t rank = 1,
      AllocateRegion allocate = nullptr)
      : config(with),
        rank(rank),
        worker(rank, kInc, with, now, std::move(allocate)) {}

  // All servers say hello.
  void start() {
    for (int32_t server = 0; server < config.num_servers; ++server) {
      welcome(server);
    }
    tick(0);
    clear();
  }

  Message from(int32_t server, Kind kind, int64_t opno = 0) const {
    Message message;
    message.kind = kind;
    message.opno = opno;
    message.header.job = kJob;
    message.header.store = kStore;
    message.header.rank = rank;
    message.header.inc = kInc;
    message.header.server = server;
    message.header.sinc = 70 + server;
    return message;
  }
  Message value(int32_t server, int64_t opno, const Blob& payload) const {
    Message message = from(server, Kind::kValue, opno);
    message.pieces = 1;
    message.index = 0;
    message.payload = payload;
    return message;
  }
  Message error(int32_t server, int64_t opno, ErrorCode code, int32_t who = -1)
      const {
    Message message = from(server, Kind::kError, opno);
    message.error = Error{code, who, {}, {}, {}};
    return message;
  }

  void give(const Frame& frame) {
    worker.on_message(frame, now);
    collect();
  }
  void give(const Message& message) {
    give(Frame{message});
  }
  void welcome(int32_t server) {
    give(from(server, Kind::kWelcome));
  }
  void done(int64_t opno, int32_t server = 0) {
    give(from(server, Kind::kDone, opno));
  }
  void got(int64_t opno, std::vector<int32_t> indices, int32_t server = 0) {
    Message message = from(server, Kind::kGot);
    for (const int32_t index : indices) {
      message.got.emplace_back(opno, index);
    }
    give(message);
  }
  CallId call(Request request, Time timeout = 100) {
    const CallId id = worker.call(std::move(request), now, timeout);
    collect();
    return id;
  }
  // Initializes keys, answered by `server`.
  void init(const std::vector<Key>& keys, int64_t total = 2) {
    call(request(Request::Kind::kInit, keys, total));
    for (const auto& message : take_sent()) {
      if (message.kind == Kind::kInit && message.index <= 0) {
        Message answer = from(message.header.server, Kind::kDone, message.opno);
        answer.kid = 1;
        Message arrived = from(message.header.server, Kind::kGot);
        arrived.got.emplace_back(message.opno, 0);
        give(Frame{arrived, answer});
      }
    }
    clear();
  }
  void tick(Time seconds) {
    now += seconds;
    worker.on_timer(now);
    collect();
  }
  // As `tick`, in steps in which no process counts as stopped, while all
  // servers answer.
  void run(Time seconds) {
    const Time until = now + seconds;
    while (now < until) {
      for (int32_t server = 0; server < config.num_servers; ++server) {
        worker.on_message({from(server, Kind::kAlive)}, now);
      }
      tick(0.5);
    }
  }

  void collect() {
    for (auto& action : worker.take()) {
      if (auto* send = std::get_if<Send>(&action)) {
        EXPECT_EQ(send->to.role, Address::Role::kServer);
        frames.push_back(send->frame);
        for (const auto& message : send->frame) {
          EXPECT_EQ(message.header.server, send->to.number);
          sent.push_back(message);
        }
      } else if (auto* end = std::get_if<Return>(&action)) {
        returns.push_back(*end);
      } else {
        others.push_back(std::move(action));
      }
    }
  }
  std::vector<Message> take_sent() {
    return std::exchange(sent, {});
  }
  void clear() {
    frames.clear();
    sent.clear();
    returns.clear();
    others.clear();
  }

  // "INIT 3", "PUSH 4.0" of what was sent, without heartbeats.
  std::vector<std::string> log() {
    std::vector<std::string> result;
    for (const auto& message : take_sent()) {
      if (message.kind == Kind::kHeartbeat) {
        continue;
      }
      std::string line = name(message.kind);
      if (message.opno != 0) {
        line += " " + std::to_string(message.opno);
      }
      if (message.index >= 0) {
        line += "." + std::to_string(message.index);
      }
      result.push_back(line);
    }
    return result;
  }
  // The end of a call, which must have ended.
  Return ended(CallId id) {
    for (const auto& end : returns) {
      if (end.call == id) {
        return end;
      }
    }
    ADD_FAILURE() << "call " << id << " has not ended";
    return {};
  }
  bool has_ended(CallId id) const {
    for (const auto& end : returns) {
      if (end.call == id) {
        return true;
      }
    }
    return false;
  }

  Config config;
  int32_t rank;
  Time now = 1000;
  Worker worker;
  std::vector<Frame> frames;
  std::vector<Message> sent;
  std::vector<Return> returns;
  Actions others;
};

} // namespace torchkv::dist

#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dist/transport/zeromq_transport.h"

namespace torchkv::dist::testing {

inline Blob bytes_of(const std::string& text) {
  auto owner = std::make_shared<const std::string>(text);
  return {owner, owner->data(), owner->size()};
}

inline std::string text_of(const Blob& blob) {
  return {reinterpret_cast<const char*>(blob.data()), blob.size()};
}

// A request of a worker, and the answer to it.
inline Frame push(
    int32_t rank,
    int32_t server,
    int64_t opno,
    Blob payload,
    int64_t inc = 1) {
  Message message;
  message.kind = Kind::kPush;
  message.header.rank = rank;
  message.header.server = server;
  message.header.inc = inc;
  message.slice = {Key(7), 0};
  message.opno = opno;
  message.pieces = 1;
  message.index = 0;
  message.payload = std::move(payload);
  return {std::move(message)};
}

inline Frame answer_to(const Frame& request, Blob payload = {}) {
  Message message;
  message.kind = Kind::kValue;
  message.header = request[0].header;
  message.opno = request[0].opno;
  message.pieces = 1;
  message.index = 0;
  message.payload = std::move(payload);
  return {std::move(message)};
}

inline ZeromqConfig config_of(int32_t rank) {
  ZeromqConfig config;
  config.rank = rank;
  config.token.fill(std::byte{42});
  config.limits.num_workers = 8;
  config.limits.num_servers = 8;
  return config;
}

// A transport with its mutex and its thread, which waits in poll() for as long
// as nothing happens: a missed event is a test that takes that long.
class Node : public Transport::Handler {
 public:
  struct Received {
    int32_t rank;
    Direction direction;
    Frame frame;
  };
  // Called in the handler for requests.
  using Serve = std::function<void(Node& node, int32_t rank, const Frame&)>;

  explicit Node(ZeromqConfig config, Serve serve = nullptr)
      : serve_(std::move(serve)), transport_(std::move(config)) {
    thread_ = std::thread([this] { run(); });
  }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  ~Node() {
    close();
  }

  ZeromqTransport& transport() {
    return transport_;
  }
  PeerAddress address() const {
    return transport_.address();
  }
  void connect(int32_t rank, const PeerAddress& address) {
    const std::lock_guard lock(mutex_);
    transport_.connect(rank, address);
  }
  void send(int32_t rank, Direction direction, Frame frame) {
    const std::lock_guard lock(mutex_);
    transport_.send(rank, direction, std::move(frame));
  }
  void reclaim() {
    const std::lock_guard lock(mutex_);
    transport_.reclaim();
  }
  int64_t num_refused() {
    const std::lock_guard lock(mutex_);
    return transport_.num_refused();
  }

  // What has come so far, once that is so many frames, or after a while.
  std::vector<Received> received(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(
        lock, patience(), [&] { return frames_.size() >= count; });
    return frames_;
  }
  size_t num_received() {
    const std::lock_guard lock(mutex_);
    return frames_.size();
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    frames_.clear();
  }
  std::vector<int32_t> lost(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, patience(), [&] { return lost_.size() >= count; });
    return lost_;
  }

  void close() {
    if (thread_.joinable()) {
      {
        const std::lock_guard lock(mutex_);
        stop_ = true;
      }
      transport_.wake();
      thread_.join();
      const std::lock_guard lock(mutex_);
      transport_.close();
    }
  }

  static std::chrono::seconds patience() {
    return std::chrono::seconds(20);
  }

 private:
  void on_frame(int32_t rank, Direction direction, Frame frame) override {
    if (serve_ && direction == Direction::kRequest) {
      serve_(*this, rank, frame);
    }
    frames_.push_back({rank, direction, std::move(frame)});
    changed_.notify_all();
  }
  void on_peer_lost(int32_t rank) override {
    lost_.push_back(rank);
    changed_.notify_all();
  }
  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      transport_.poll(lock, 60, *this);
    }
  }

  std::mutex mutex_; // guards all that follows
  std::condition_variable changed_;
  std::vector<Received> frames_;
  std::vector<int32_t> lost_;
  bool stop_ = false;
  const Serve serve_;
  ZeromqTransport transport_;
  std::thread thread_;
};

// Answers each push with its own payload.
inline void echo(Node& node, int32_t rank, const Frame& frame) {
  node.transport().send(
      rank, Direction::kAnswer, answer_to(frame, frame[0].payload));
}

// As if it were on another host: reached over TCP, its process unknown.
inline PeerAddress elsewhere(PeerAddress address) {
  address.host = "elsewhere";
  return address;
}

inline std::string folder_of(const PeerAddress& address) {
  const std::string path = address.ipc.substr(std::strlen("ipc://"));
  return path.substr(0, path.rfind('/'));
}

} // namespace torchkv::dist::testing

#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "../../core/export.h"
#include "own_frames.h"
#include "poller.h"
#include "transport.h"

namespace torchkv::dist {

// Within one process, the job's only one: without sockets. Frames to other
// ranks are lost.
class TORCHKV_API DirectTransport final : public Transport {
 public:
  explicit DirectTransport(int32_t rank);

  const PeerAddress& address() const override {
    return address_;
  }
  void connect(int32_t rank, const PeerAddress& address) override;
  void disconnect(int32_t rank) override;
  void send(int32_t rank, Direction direction, Frame frame) override;
  void deliver(Handler& handler) override;
  void poll(std::unique_lock<std::mutex>& lock, Time timeout, Handler& handler)
      override;
  void wake() override;
  void close() override;

 private:
  const int32_t rank_;
  const PeerAddress address_;
  OwnFrames own_;
  bool delivering_ = false;
  Poller poller_;
};

} // namespace torchkv::dist

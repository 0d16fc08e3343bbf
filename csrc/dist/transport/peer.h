#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "../../core/export.h"
#include "../protocol/config.h"
#include "host.h"
#include "socket.h"
#include "transport.h"

namespace torchkv::dist {

// This process's connection to the socket of another, which ZeroMQ makes again
// when it breaks.
class Peer {
 public:
  struct Options {
    std::string endpoint;
    std::string name; // unique in the context
    bool same_host = false;
    Time patience = 1; // without a connection
  };
  // `dealer` is ready to connect.
  Peer(
      zeromq::Context& context,
      std::unique_ptr<zeromq::Socket> dealer,
      const PeerAddress& address,
      const Options& options);

  const PeerAddress& address() const {
    return address_;
  }
  zeromq::Socket& dealer() {
    return *dealer_;
  }
  const zeromq::Monitor& monitor() const {
    return monitor_;
  }
  const ProcessWatch* watch() const { // null: on another host
    return watch_.get();
  }

  // Whether a message may reach it: else it would only take memory.
  bool takes_messages() const {
    return state_ != State::kLost && state_ != State::kEnded;
  }
  // Looks at what the monitor and the watch have noticed. True: it is to be
  // reported that the peer is lost, which is so once.
  bool observe(Time now);
  // Broken: observe() is to be called again soon.
  bool is_down() const {
    return state_ == State::kDown;
  }
  bool has_ended() const {
    return state_ == State::kEnded;
  }

 private:
  // The connection has not been made yet; exists; broke; broke and cannot be
  // made again; the process has ended.
  enum class State : uint8_t { kNew, kUp, kDown, kLost, kEnded };

  const PeerAddress address_;
  const Time patience_;
  std::unique_ptr<zeromq::Socket> dealer_;
  zeromq::Monitor monitor_;
  std::unique_ptr<ProcessWatch> watch_;
  State state_ = State::kNew;
  Time since_ = 0; // of kDown
  bool reported_ = false;
};

} // namespace torchkv::dist

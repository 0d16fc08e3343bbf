#include "peer.h"

#include <memory>
#include <utility>

namespace torchkv::dist {

namespace zmq = zeromq;

Peer::Peer(
    zmq::Context& context,
    std::unique_ptr<zmq::Socket> dealer,
    const PeerAddress& address,
    const Options& options)
    : address_(address),
      patience_(options.patience),
      dealer_(std::move(dealer)),
      monitor_(
          context,
          *dealer_,
          "inproc://monitor-" + options.name,
          zmq::kClosed + zmq::kDisconnected + zmq::kHandshakeSucceeded) {
  if (options.same_host) {
    watch_ = std::make_unique<ProcessWatch>(address);
  }
  dealer_->connect(options.endpoint);
}

bool Peer::observe(Time now) {
  while (const auto number = monitor_.next()) {
    if (number == zmq::kHandshakeSucceeded) {
      state_ = State::kUp;
    } else if (number == zmq::kDisconnected && state_ == State::kUp) {
      state_ = State::kDown;
      since_ = now;
    } else if (number == zmq::kClosed && state_ == State::kDown) {
      state_ = State::kLost; // refused
    }
  }
  if (state_ == State::kDown && now >= since_ + patience_) {
    state_ = State::kLost;
  }
  if (watch_ != nullptr && watch_->has_ended()) {
    state_ = State::kEnded;
    dealer_->set(zmq::kLinger, 0); // what waits can never leave
  }
  return !takes_messages() && !std::exchange(reported_, true);
}

} // namespace torchkv::dist

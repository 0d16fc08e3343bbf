#include "zeromq_transport.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <utility>
#include <vector>

#include "../../core/process.h"
#include "../byte_counts.h"

namespace torchkv::dist {

namespace {

// A broken connection is made again after this time, then after twice as long,
// and so on.
constexpr int kReconnectMs = 20;
constexpr int kMaxReconnectMs = 1000;
constexpr int kHandshakeMs = 5000;
constexpr Time kPatience = 1; // with a broken connection

int64_t total_bytes(const std::vector<Blob>& payloads) {
  size_t sum = 0;
  for (const auto& payload : payloads) {
    sum += payload.size();
  }
  return static_cast<int64_t>(sum);
}

// glibc gives freed memory back to the system beyond a threshold, and the page
// faults that follow take longer than to receive a piece: without this, pieces
// of 1 MB arrive at a third of the rate. The threshold grows to twice the
// largest block of at most 32 MB that has been freed, which most programs with
// tensors do sooner or later.
void raise_trim_threshold() {
  void* volatile block = std::malloc(size_t{31} * 1024 * 1024); // not touched
  std::free(block);
}

// A short one is copied when it is sent.
Blob part_of(std::vector<std::byte>& bytes) {
  if (bytes.size() < zeromq::Socket::kSharedBytes) {
    return {nullptr, bytes.data(), bytes.size()};
  }
  auto owner = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  const auto* const data = owner->data();
  const size_t size = owner->size();
  return {std::move(owner), data, size};
}

bool is_sign_of_life(const Message& message) {
  switch (message.kind) {
    case Kind::kHello:
    case Kind::kWelcome:
    case Kind::kHeartbeat:
    case Kind::kAlive:
      return true;
    default:
      return false;
  }
}

int ms_of(Time seconds) {
  return static_cast<int>(seconds * 1000);
}

} // namespace

uint64_t ZeromqTransport::number_of(Source source, int32_t rank) {
  return (static_cast<uint64_t>(source) << 32U) | static_cast<uint32_t>(rank);
}

ZeromqTransport::ZeromqTransport(ZeromqConfig config)
    : config_(std::move(config)),
      forks_(fork_count()),
      address_(own_process()),
      own_(config_.rank) {
  if (config_.security == Security::kCurve) {
    keys_ = std::make_unique<const zeromq::CurveKeys>(
        zeromq::derive_curve_keys(config_.secret));
  }
  raise_trim_threshold();
  context_ = std::make_unique<zeromq::Context>();
  try {
    bind();
  } catch (...) {
    folder_.remove();
    throw;
  }
}

void ZeromqTransport::bind() {
  const bool has_tcp =
      config_.security != Security::kIpc && !config_.tcp_host.empty();
  if (has_tcp && keys_ != nullptr) {
    authenticator_ = std::make_unique<zeromq::Authenticator>(
        *context_, keys_->client_public);
    poller_.add(
        authenticator_->socket().fd(), number_of(Source::kAuthenticator));
  }
  router_ = std::make_unique<zeromq::Socket>(*context_, zeromq::kRouter);
  configure(*router_);
  // An answer to a process that is gone is an error, not lost in silence.
  router_->set(zeromq::kRouterMandatory, 1);
  // In addition to the folder's mode.
  router_->try_set(zeromq::kIpcFilterUid, geteuid());
  router_->bind(folder_.endpoint());
  address_.ipc = folder_.endpoint();
  // An option applies to the endpoints that are bound after it.
  if (has_tcp) {
    if (keys_ != nullptr) {
      router_->set(zeromq::kCurveServer, 1);
      router_->set(zeromq::kCurveSecretKey, keys_->server_secret);
      router_->set(zeromq::kZapDomain, std::string("torchkv"));
    }
    const bool is_six = config_.tcp_host.find(':') != std::string::npos;
    router_->set(zeromq::kIpv6, is_six ? 1 : 0);
    router_->bind(
        "tcp://" + (is_six ? '[' + config_.tcp_host + ']' : config_.tcp_host) +
        ":*");
    address_.tcp = router_->last_endpoint();
  }
  poller_.add(router_->fd(), number_of(Source::kRouter));
  if (config_.memory != nullptr) {
    share_memory();
  }
}

void ZeromqTransport::share_memory() {
  try {
    links_ = std::make_unique<MemoryLinks>(
        config_.rank,
        config_.token,
        config_.memory,
        SocketFolder::descriptor_path(address_.ipc),
        poller_.event());
    poller_.add(links_->fd(), number_of(Source::kMemory));
  } catch (const c10::Error& error) {
    TORCH_WARN(
        "torchkv: values travel over sockets, as this process cannot share "
        "memory: ",
        error.what_without_backtrace());
  }
}

ZeromqTransport::~ZeromqTransport() {
  close();
}

void ZeromqTransport::configure(zeromq::Socket& socket) const {
  // The protocol's credit limits what is in flight; a full queue would lose.
  socket.set(zeromq::kSndHwm, 0);
  socket.set(zeromq::kRcvHwm, 0);
  socket.set(zeromq::kLinger, ms_of(config_.linger));
  socket.set(zeromq::kMaxMsgSize, config_.max_part_bytes);
  // The first limits how long what was sent, the others how long an idle
  // connection goes unacknowledged.
  socket.set(zeromq::kTcpMaxRetransmit, ms_of(config_.dead));
  constexpr int kProbes = 3;
  const int period =
      std::max(1, static_cast<int>(config_.dead) / (kProbes + 1));
  socket.set(zeromq::kTcpKeepalive, 1);
  socket.set(zeromq::kTcpKeepaliveCount, kProbes);
  socket.set(zeromq::kTcpKeepaliveIdle, period);
  socket.set(zeromq::kTcpKeepaliveInterval, period);
  socket.set(zeromq::kHandshakeIvl, kHandshakeMs);
}

std::string ZeromqTransport::endpoint_of(
    int32_t rank,
    const PeerAddress& address) const {
  if (address.host == address_.host && !address.ipc.empty()) {
    return address.ipc;
  }
  TORCH_CHECK(
      config_.security != Security::kIpc,
      "security='ipc' expects all ranks on one host and in one container, but "
      "rank ",
      rank,
      " is elsewhere");
  TORCH_CHECK(
      !address.tcp.empty(),
      "rank ",
      rank,
      " is on another host, or in another container, but does not listen on a "
      "network");
  return address.tcp;
}

void ZeromqTransport::connect(int32_t rank, const PeerAddress& address) {
  if (rank == config_.rank) {
    return;
  }
  const auto known = peers_.find(rank);
  if (known != peers_.end() && known->second.takes_messages()) {
    const PeerAddress& old = known->second.address();
    // The port and the folder are a process's own.
    if (old.ipc == address.ipc && old.tcp == address.tcp) {
      return;
    }
  }
  Peer::Options options;
  options.endpoint = endpoint_of(rank, address);
  options.name = std::to_string(num_connected_++);
  options.same_host = address.host == address_.host;
  options.patience = kPatience;
  auto dealer = std::make_unique<zeromq::Socket>(*context_, zeromq::kDealer);
  configure(*dealer);
  dealer->set(zeromq::kReconnectIvl, kReconnectMs);
  dealer->set(zeromq::kReconnectIvlMax, kMaxReconnectMs);
  if (options.endpoint.rfind("tcp://", 0) == 0) {
    const bool is_six = options.endpoint.find('[') != std::string::npos;
    dealer->set(zeromq::kIpv6, is_six ? 1 : 0);
    if (keys_ != nullptr) {
      dealer->set(zeromq::kCurveServerKey, keys_->server_public);
      dealer->set(zeromq::kCurvePublicKey, keys_->client_public);
      dealer->set(zeromq::kCurveSecretKey, keys_->client_secret);
    }
  }
  if (known != peers_.end()) {
    forget(known);
  }
  Peer& peer =
      peers_.try_emplace(rank, *context_, std::move(dealer), address, options)
          .first->second;
  if (links_ != nullptr && options.same_host && !address.ipc.empty()) {
    try {
      links_->connect(
          rank, address, SocketFolder::descriptor_path(address.ipc));
      links_->take_descriptors(); // the queue is short
    } catch (const c10::Error& error) {
      TORCH_WARN(
          "torchkv: values travel to rank ",
          rank,
          " over a socket: ",
          error.what_without_backtrace());
    }
  }
  poller_.add(peer.dealer().fd(), number_of(Source::kDealer, rank));
  poller_.add(peer.monitor().fd(), number_of(Source::kState, rank));
  if (peer.watch() != nullptr && peer.watch()->fd() >= 0) {
    poller_.add(peer.watch()->fd(), number_of(Source::kState, rank));
  }
  mark(number_of(Source::kDealer, rank));
  mark(number_of(Source::kState, rank));
}

void ZeromqTransport::disconnect(int32_t rank) {
  const auto peer = peers_.find(rank);
  if (peer != peers_.end()) {
    forget(peer);
  }
}

void ZeromqTransport::forget(std::map<int32_t, Peer>::iterator peer) {
  poller_.remove(peer->second.dealer().fd());
  poller_.remove(peer->second.monitor().fd());
  if (peer->second.watch() != nullptr && peer->second.watch()->fd() >= 0) {
    poller_.remove(peer->second.watch()->fd());
  }
  broken_.erase(peer->first);
  peers_.erase(peer);
}

void ZeromqTransport::send(int32_t rank, Direction direction, Frame frame) {
  if (frame.empty()) {
    return;
  }
  if (rank == config_.rank) {
    own_.put(direction, std::move(frame));
    return;
  }
  const auto peer = peers_.find(rank);
  if (direction == Direction::kRequest &&
      (peer == peers_.end() || !peer->second.takes_messages())) {
    return;
  }
  const int64_t incarnation = frame.front().header.inc;
  // Of a rank with several processes, an answer is for the one that has asked.
  const bool is_linked = links_ != nullptr &&
      (direction == Direction::kRequest ||
       links_->has_heard(rank, incarnation));
  const auto* const identity = direction == Direction::kAnswer
      ? routes_.find(rank, incarnation)
      : nullptr;
  if (direction == Direction::kAnswer && !is_linked && identity == nullptr) {
    return;
  }
  Encoded encoded = encode(frame, direction, config_.token);
  Blob names;
  const int64_t num_bytes = total_bytes(encoded.payloads);
  if (is_linked) {
    names = links_->name(rank, encoded.payloads);
  }
  const int64_t num_sent = total_bytes(encoded.payloads);
  zeromq::Parts parts;
  parts.reserve(3 + encoded.payloads.size());
  if (names.size() != 0) {
    parts.push_back(names);
  }
  parts.push_back(part_of(encoded.head));
  // Signs of life go through the socket, whose connection they prove.
  if (is_linked && encoded.payloads.empty() &&
      std::none_of(frame.begin(), frame.end(), is_sign_of_life) &&
      links_->put(rank, direction, parts)) {
    byte_counts().named += num_bytes;
    return;
  }
  zeromq::Socket* socket = router_.get();
  uint64_t source = number_of(Source::kRouter);
  if (direction == Direction::kRequest) {
    socket = &peer->second.dealer();
    source = number_of(Source::kDealer, rank);
  } else if (identity == nullptr) {
    links_->undo(rank, names);
    return;
  } else {
    parts.emplace(parts.begin(), nullptr, identity->data(), identity->size());
  }
  for (auto& payload : encoded.payloads) {
    parts.push_back(std::move(payload));
  }
  const bool sent = socket->send(parts);
  byte_counts().named += num_bytes - num_sent;
  byte_counts().sent += num_sent;
  // The call may have noticed input, and then its descriptor tells poll()
  // nothing of it.
  if (socket->has_input()) {
    mark(source);
  }
  if (!sent && is_linked) {
    links_->undo(rank, names);
  }
  if (!sent && direction == Direction::kAnswer) {
    routes_.erase(rank, incarnation);
  }
}

void ZeromqTransport::reclaim() {
  if (links_ != nullptr) {
    links_->reclaim();
  }
}

void ZeromqTransport::wake() {
  poller_.wake();
}

void ZeromqTransport::close() {
  if (closed_ || forks_ != fork_count()) {
    return; // of a forked child: the sockets are its parent's
  }
  closed_ = true;
  while (!peers_.empty()) {
    forget(peers_.begin());
  }
  poller_.remove(router_->fd());
  router_.reset();
  if (links_ != nullptr) { // which keeps what others may still read
    poller_.remove(links_->fd());
  }
  if (authenticator_ != nullptr) {
    poller_.remove(authenticator_->socket().fd());
    authenticator_.reset();
  }
  context_.reset(); // waits for what leaves
  folder_.remove();
  own_.clear();
}

} // namespace torchkv::dist

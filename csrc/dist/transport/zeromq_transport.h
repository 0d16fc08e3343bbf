#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include "../../core/export.h"
#include "curve.h"
#include "frame.h"
#include "memory_links.h"
#include "own_frames.h"
#include "peer.h"
#include "poller.h"
#include "routes.h"
#include "socket.h"
#include "socket_folder.h"
#include "transport.h"

namespace torchkv::dist {

// Who may connect.
enum class Security : uint8_t {
  kIpc, // processes of the same user on the same host: there is no network
  kCurve, // and, from other hosts, processes that hold the job's secret;
          // what they send is encrypted
  kNone, // and, from other hosts, anybody, whose frames need the token
};

struct ZeromqConfig {
  int32_t rank = 0;
  Token token{};
  Limits limits; // of all stores of the process

  Security security = Security::kIpc;
  std::string secret; // of the job: for kCurve
  // Of tcp_host(), for ranks on other hosts; empty: there are none.
  std::string tcp_host;
  // Payloads in it are not copied between processes of this host; null: all
  // are.
  std::shared_ptr<SharedMemory> memory;

  // Of a head or a payload. A barrier's head has all keys.
  int64_t max_part_bytes = int64_t{64} * 1024 * 1024;
  // A TCP connection is broken whose other end has acknowledged, or taken,
  // nothing for so long. That is no proof that its rank is: the cores have
  // heartbeats. (Those of libzmq 4.3.5 end the process, as out_event() asserts,
  // where one is due on a connection that has broken while its socket is being
  // closed.)
  Time dead = 60;
  Time linger = 0.25; // at close
};

// Over ZeroMQ: between ranks of one host over sockets in a folder of this user,
// else over TCP. A socket that is bound takes requests of other ranks and sends
// them answers; one for each other rank sends it requests and takes answers.
class TORCHKV_API ZeromqTransport final : public Transport {
 public:
  // RuntimeError if ZeroMQ or what `security` needs is missing, or the sockets
  // cannot be made.
  explicit ZeromqTransport(ZeromqConfig config);
  ~ZeromqTransport() override;

  const PeerAddress& address() const override {
    return address_;
  }
  // RuntimeError if the peer has no address that this process can use.
  void connect(int32_t rank, const PeerAddress& address) override;
  void disconnect(int32_t rank) override;
  void send(int32_t rank, Direction direction, Frame frame) override;
  void deliver(Handler& handler) override;
  void poll(std::unique_lock<std::mutex>& lock, Time timeout, Handler& handler)
      override;
  void reclaim() override;
  void wake() override;
  void close() override;

  // Messages that were refused, such as those with another token.
  int64_t num_refused() const {
    return num_refused_;
  }

 private:
  // What may have something for deliver().
  enum class Source : uint8_t {
    kRouter,
    kDealer,
    kState,
    kAuthenticator,
    kMemory
  };
  static uint64_t number_of(Source source, int32_t rank = 0);

  void bind();
  void share_memory();
  void configure(zeromq::Socket& socket) const;
  std::string endpoint_of(int32_t rank, const PeerAddress& address) const;
  void forget(std::map<int32_t, Peer>::iterator peer);

  // It is to be served.
  void mark(uint64_t source);
  void serve_all(Handler& handler);
  // The number of calls of the handler, about.
  size_t serve(uint64_t source, Handler& handler);
  // Messages in shared memory; their number.
  size_t serve_links(Handler& handler);
  // One message; false: there is none.
  bool receive(uint64_t source, int32_t rank, Handler& handler);
  std::optional<Frame> decoded(
      const std::vector<Blob>& parts,
      size_t first,
      Direction direction);
  void observe(int32_t rank, Handler& handler);

  const ZeromqConfig config_;
  const uint64_t forks_;
  PeerAddress address_;
  std::unique_ptr<const zeromq::CurveKeys> keys_; // null: no CURVE
  int64_t num_refused_ = 0;
  int64_t num_connected_ = 0;
  bool delivering_ = false;
  bool waiting_ = false; // poll(), without the mutex
  bool closed_ = false;

  Poller poller_;
  SocketFolder folder_;
  std::deque<uint64_t> ready_; // sources
  std::unordered_set<uint64_t> known_ready_;
  std::unique_ptr<MemoryLinks> links_; // null: no shared memory
  OwnFrames own_;
  ListCache lists_;
  Routes routes_;
  std::set<int32_t> broken_; // ranks with a broken connection

  // In this order: the context is destroyed after its sockets.
  std::unique_ptr<zeromq::Context> context_;
  std::unique_ptr<zeromq::Authenticator> authenticator_; // null: no CURVE
  std::unique_ptr<zeromq::Socket> router_;
  std::map<int32_t, Peer> peers_;
};

} // namespace torchkv::dist

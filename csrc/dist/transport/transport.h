#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "../protocol/config.h"
#include "../protocol/message.h"

namespace torchkv::dist {

// A request goes from the sender's worker to the receiver's server, an answer
// the other way.
enum class Direction : uint8_t { kRequest, kAnswer };

// Where a process is reached. From other processes it is a hint only: what
// counts is the token in the frames.
struct PeerAddress {
  // Equal where processes share file paths and process ids: the same boot of
  // the same host, the same containers.
  std::string host;
  std::string ipc; // endpoint for processes with the same `host`
  std::string tcp; // endpoint for others; empty: none
  int64_t pid = 0;
  uint64_t started = 0; // when the process did: process ids are used again
};

// Moves frames between the processes of a job, of all its stores. Frames may be
// lost, as when a peer is gone; while a connection lasts, those of one
// direction arrive once, and mostly in order: one that is sent through shared
// memory overtakes others that are on their way through a socket.
//
// All functions but wake() and poll() are called under one mutex of the owner,
// by any thread. A forked child may only destroy the transport, which then does
// nothing.
class Transport {
 public:
  // Called under that mutex, by deliver() and poll(). May call send(),
  // connect() and disconnect().
  class Handler {
   public:
    // `rank`: the sender, which knows the job's token.
    virtual void on_frame(int32_t rank, Direction direction, Frame frame) = 0;
    // Once for each connect(), at most: the process has ended, or cannot be
    // reached any more. It may still be alive.
    virtual void on_peer_lost(int32_t rank) = 0;

   protected:
    ~Handler() = default;
  };

  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  // As close().
  virtual ~Transport() = default;

  // For the other processes' connect().
  virtual const PeerAddress& address() const = 0;

  // From now on requests to `rank` go to that address, and on_peer_lost()
  // reports its loss. Replaces an earlier address of another process of the
  // rank; does nothing for the same. The own rank needs none.
  virtual void connect(int32_t rank, const PeerAddress& address) = 0;
  // Forgets a peer: it may end without on_peer_lost().
  virtual void disconnect(int32_t rank) = 0;

  // Never blocks. A request goes to the address of connect(); an answer goes to
  // the process that the rank's latest request with this Header::inc came from.
  // Payloads are not copied and must not be written until nothing refers to
  // them any more; their last owner may be released by any thread, and must not
  // need the mutex for that.
  //
  // A frame to the own rank waits for the next deliver() or poll(): a thread
  // other than poll()'s calls deliver() or wake() after it.
  virtual void send(int32_t rank, Direction direction, Frame frame) = 0;

  // Hands over what is known to have arrived, without waiting or looking for
  // more, as poll() does: at most a bounded number of frames, and poll() does
  // not wait for the rest. Does nothing within a call of the handler.
  virtual void deliver(Handler& handler) = 0;

  // Waits until something arrives, for at most `timeout` seconds or until
  // wake(), while `lock` is released, and hands it over as deliver() does. May
  // return early with nothing. By one thread at a time. REQUIRES: `lock` holds
  // the mutex.
  virtual void poll(
      std::unique_lock<std::mutex>& lock,
      Time timeout,
      Handler& handler) = 0;
  // Releases payloads that no receiver reads any more, which may otherwise be
  // kept until more is sent. To be called now and then, too.
  virtual void reclaim() {}
  // Ends poll() or, if none runs, the next one. Any thread, with or without the
  // mutex, but not after close().
  virtual void wake() = 0;

  // Lets what was sent leave, for a fraction of a second at most, and frees
  // everything. REQUIRES: no poll() runs. Afterwards the transport may only be
  // destroyed.
  virtual void close() = 0;
};

} // namespace torchkv::dist

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../../core/export.h"
#include "../protocol/blob.h"
#include "zeromq.h"

namespace torchkv::dist::zeromq {

// A multipart message.
using Parts = std::vector<Blob>;

inline std::string_view text_of(const Blob& part) {
  return {reinterpret_cast<const char*>(part.data()), part.size()};
}

// zmq_ctx_t, with one I/O thread.
class TORCHKV_API Context {
 public:
  Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  // Waits until what its sockets sent has left, or their linger time has
  // passed. Does nothing in a forked child. REQUIRES: they are closed.
  ~Context();

  void* native() const {
    return native_;
  }

 private:
  void* native_;
  uint64_t forks_;
};

// zmq socket. Used by one thread at a time, with a mutex between them.
class TORCHKV_API Socket {
 public:
  Socket(Context& context, SocketType type);
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  // Does nothing in a forked child.
  ~Socket();

  template <class T>
  void set(Option option, const T& value) {
    set(option, &value, sizeof(value));
  }
  void set(Option option, const std::string& text) {
    set(option, text.data(), text.size());
  }
  // For an option that not every library has.
  template <class T>
  void try_set(Option option, const T& value) {
    try_set(option, &value, sizeof(value));
  }
  void bind(const std::string& endpoint);
  void connect(const std::string& endpoint);
  // Of the latest bind.
  std::string last_endpoint() const;
  // Becomes readable when input may have come, unless a call of any function of
  // the socket has noticed the input.
  int fd() const;
  // Whether a message waits.
  bool has_input() const;

  // Without waiting; false: the message is lost. Parts of kSharedBytes and more
  // are not copied: their owners are released when they have left, by any
  // thread.
  bool send(const Parts& parts);
  // Without waiting; false: there is none. Parts are not copied. A message of
  // more parts than `limit` comes as `limit` + 1 of them.
  bool receive(Parts& parts, size_t limit);

  static constexpr size_t kSharedBytes = 16384;

 private:
  friend class Monitor;
  void set(Option option, const void* value, size_t size);
  bool try_set(Option option, const void* value, size_t size);
  bool send(const Blob& part, bool more);

  void* native_;
  uint64_t forks_;
};

// Receives the events of a socket. REQUIRES: it ends before the socket.
class TORCHKV_API Monitor {
 public:
  // `endpoint` is of the inproc transport and unique in the context.
  Monitor(
      Context& context,
      Socket& watched,
      const std::string& endpoint,
      int events);
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;
  // Does nothing in a forked child.
  ~Monitor();

  int fd() const {
    return socket_.fd();
  }
  // Without waiting: the number of the next event.
  std::optional<int> next();

 private:
  void stop() noexcept;

  Socket& watched_;
  Socket socket_;
};

} // namespace torchkv::dist::zeromq

#include "socket.h"

#include <c10/util/Exception.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "../../core/errors.h"
#include "../../core/process.h"

namespace torchkv::dist::zeromq {
namespace {

void check(bool succeeded, const char* what) {
  TORCH_CHECK(
      succeeded, "ZeroMQ: ", what, " failed: ", functions().last_error());
}

void check(bool succeeded, const char* what, const std::string& endpoint) {
  TORCH_CHECK(
      succeeded,
      "ZeroMQ: ",
      what,
      " ",
      endpoint,
      " failed: ",
      functions().last_error());
}

// zmq_msg_t with an owner. It outlives its socket and context, which it does
// not refer to.
class Message {
 public:
  Message() {
    functions().msg_init(&raw_);
  }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
  ~Message() {
    functions().msg_close(&raw_);
  }
  RawMessage* raw() {
    return &raw_;
  }

 private:
  RawMessage raw_{};
};

} // namespace

Context::Context() : native_(functions().ctx_new()), forks_(fork_count()) {
  check(native_ != nullptr, "zmq_ctx_new");
  functions().ctx_set(native_, kIoThreads, 1);
}

Context::~Context() {
  while (forks_ == fork_count() && functions().ctx_term(native_) != 0 &&
         functions().error_number() == EINTR) {
  }
}

Socket::Socket(Context& context, SocketType type)
    : native_(functions().socket(context.native(), type)),
      forks_(fork_count()) {
  check(native_ != nullptr, "zmq_socket");
}

Socket::~Socket() {
  if (forks_ == fork_count()) {
    functions().close(native_);
  }
}

void Socket::set(Option option, const void* value, size_t size) {
  check(try_set(option, value, size), "zmq_setsockopt");
}

bool Socket::try_set(Option option, const void* value, size_t size) {
  return functions().setsockopt(native_, option, value, size) == 0;
}

void Socket::bind(const std::string& endpoint) {
  check(
      functions().bind(native_, endpoint.c_str()) == 0,
      "zmq_bind to",
      endpoint);
}

void Socket::connect(const std::string& endpoint) {
  check(
      functions().connect(native_, endpoint.c_str()) == 0,
      "zmq_connect to",
      endpoint);
}

std::string Socket::last_endpoint() const {
  std::array<char, 512> text{};
  size_t size = text.size();
  check(
      functions().getsockopt(native_, kLastEndpoint, text.data(), &size) == 0,
      "zmq_getsockopt");
  return text.data();
}

int Socket::fd() const {
  int fd = -1;
  size_t size = sizeof(fd);
  check(
      functions().getsockopt(native_, kFd, &fd, &size) == 0, "zmq_getsockopt");
  return fd;
}

bool Socket::has_input() const {
  unsigned events = 0;
  size_t size = sizeof(events);
  const int failed = functions().getsockopt(native_, kEvents, &events, &size);
  // A doubt (EINTR) is resolved by receive().
  return failed != 0 || (events & kPollIn) != 0;
}

bool Socket::send(const Blob& part, bool more) {
  const Functions& zmq = functions();
  RawMessage raw{};
  if (part.size() < kSharedBytes) {
    if (zmq.msg_init_size(&raw, part.size()) != 0) {
      return false;
    }
    if (part.size() != 0) {
      std::memcpy(zmq.msg_data(&raw), part.data(), part.size());
    }
  } else {
    TORCHKV_INTERNAL_ASSERT(part.owner() != nullptr, "it would be freed");
    auto* const owner = new std::shared_ptr<const void>(part.owner());
    const auto release = [](void*, void* hint) {
      delete static_cast<std::shared_ptr<const void>*>(hint);
    };
    // libzmq does not write to what it sends.
    auto* const data = const_cast<std::byte*>(part.data());
    if (zmq.msg_init_data(&raw, data, part.size(), release, owner) != 0) {
      delete owner;
      return false;
    }
  }
  int sent = -1;
  do {
    sent =
        zmq.msg_send(&raw, native_, more ? kDontWait + kSendMore : kDontWait);
  } while (sent < 0 && zmq.error_number() == EINTR);
  if (sent < 0) {
    zmq.msg_close(&raw);
  }
  return sent >= 0;
}

bool Socket::send(const Parts& parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!send(parts[i], i + 1 < parts.size())) {
      return false;
    }
  }
  return true;
}

bool Socket::receive(Parts& parts, size_t limit) {
  const Functions& zmq = functions();
  parts.clear();
  bool more = true;
  while (more) {
    auto message = std::make_shared<Message>();
    if (zmq.msg_recv(message->raw(), native_, kDontWait) < 0) {
      // Interrupted: the poll that follows asks again. Within a message it does
      // not happen: all parts arrive together.
      parts.clear();
      return false;
    }
    more = zmq.msg_more(message->raw()) != 0;
    if (parts.size() <= limit) {
      const size_t size = zmq.msg_size(message->raw());
      const void* const data = zmq.msg_data(message->raw());
      parts.emplace_back(std::move(message), data, size);
    }
  }
  return true;
}

Monitor::Monitor(
    Context& context,
    Socket& watched,
    const std::string& endpoint,
    int events)
    : watched_(watched), socket_(context, kPair) {
  socket_.set(kLinger, 0);
  socket_.set(kRcvHwm, 0); // a full one would block the I/O thread
  check(
      functions().socket_monitor(watched.native_, endpoint.c_str(), events) ==
          0,
      "zmq_socket_monitor at",
      endpoint);
  try {
    socket_.connect(endpoint);
  } catch (...) {
    stop();
    throw;
  }
}

Monitor::~Monitor() {
  stop();
}

// Before the receiving end is closed: an event without one would block the I/O
// thread, and with it all sockets (github.com/zeromq/libzmq/issues/3575).
void Monitor::stop() noexcept {
  if (watched_.forks_ == fork_count()) {
    functions().socket_monitor(watched_.native_, nullptr, 0);
  }
}

std::optional<int> Monitor::next() {
  Parts event; // number and value; endpoint
  while (socket_.receive(event, 2)) {
    uint16_t number = 0;
    if (event[0].size() >= sizeof(number)) {
      std::memcpy(&number, event[0].data(), sizeof(number));
      return number;
    }
  }
  return std::nullopt;
}

} // namespace torchkv::dist::zeromq

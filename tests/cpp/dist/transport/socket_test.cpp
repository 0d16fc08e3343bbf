#include "dist/transport/socket.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "dist/transport/socket_folder.h"
#include "node.h"

namespace torchkv::dist::zeromq {
namespace {

bool becomes_true(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Two sockets, of which one connects to the other.
class Link {
 public:
  explicit Link(Context& context)
      : client(context, kDealer),
        server_(std::make_unique<Socket>(context, kRouter)) {
    server_->set(kLinger, 0);
    client.set(kLinger, 0);
    server_->bind(folder_.endpoint());
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link() {
    folder_.remove();
  }

  void connect() {
    client.connect(folder_.endpoint());
  }
  bool works() {
    client.send({dist::testing::bytes_of("x")});
    Parts received;
    return becomes_true([&] { return server_->receive(received, 2); });
  }
  void disconnect() {
    server_.reset();
  }

  Socket client;

 private:
  SocketFolder folder_;
  std::unique_ptr<Socket> server_;
};

TEST(SocketTest, ALongPartNeedsAnOwner) {
  Context context;
  Link link(context);
  link.connect();
  const std::string text(Socket::kSharedBytes, 'x');
  EXPECT_ANY_THROW(link.client.send({Blob(nullptr, text.data(), text.size())}));
  link.client.send({Blob(nullptr, text.data(), text.size() - 1)});
  EXPECT_TRUE(link.works());
}

constexpr const char* kEndpoint = "inproc://monitor";
constexpr int kConnections = kHandshakeSucceeded + kDisconnected;

TEST(MonitorTest, TellsOfConnections) {
  Context context;
  Link link(context);
  Monitor monitor(context, link.client, kEndpoint, kConnections);
  std::optional<int> event;
  const auto next = [&] { return (event = monitor.next()).has_value(); };
  link.connect();
  EXPECT_TRUE(becomes_true(next));
  EXPECT_EQ(event, kHandshakeSucceeded);
  EXPECT_EQ(monitor.next(), std::nullopt);
  link.disconnect();
  EXPECT_TRUE(becomes_true(next));
  EXPECT_EQ(event, kDisconnected);
}

// The events of a socket whose monitor has ended must not block the I/O thread,
// which serves the others, too.
TEST(MonitorTest, ItsEndDoesNotStopOtherSockets) {
  Context context;
  Link other(context);
  other.connect();
  Link link(context);
  {
    const Monitor monitor(context, link.client, kEndpoint, kConnections);
    link.connect();
    EXPECT_TRUE(link.works());
  }
  // Both ends of the monitor close on threads of the context.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  link.disconnect();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_TRUE(other.works());
}

} // namespace
} // namespace torchkv::dist::zeromq

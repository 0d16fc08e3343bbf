// ZeromqTransport: who is not of the job is not heard, and does no harm.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../error_text.h"
#include "dist/transport/curve.h"
#include "node.h"

namespace torchkv::dist {
namespace {

using ::torchkv::testing::error_text;
using namespace testing; // NOLINT(google-build-using-namespace)

ZeromqConfig config_with(Security security, int32_t rank) {
  ZeromqConfig config = config_of(rank);
  config.security = security;
  config.secret = "the job's secret";
  config.tcp_host = "127.0.0.1";
  return config;
}

PeerAddress reached_by(Security security, const Node& node) {
  return security == Security::kIpc ? node.address()
                                    : elsewhere(node.address());
}

// Whether the server answers rank 1, which does all as it should.
::testing::AssertionResult serves(Security security, Node& server) {
  Node worker(config_with(security, 1));
  worker.connect(0, reached_by(security, server));
  worker.send(0, Direction::kRequest, push(1, 0, 1, bytes_of("x")));
  return worker.received(1).size() == 1 ? ::testing::AssertionSuccess()
                                        : ::testing::AssertionFailure();
}

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

// How many messages it has refused, once that is so many, or after a while.
int64_t refused(Node& node, int64_t count) {
  const auto end = std::chrono::steady_clock::now() + Node::patience();
  while (node.num_refused() < count && std::chrono::steady_clock::now() < end) {
    sleep_ms(1);
  }
  return node.num_refused();
}

// A stream to an endpoint, for bytes that ZeroMQ does not make.
class RawStream {
 public:
  explicit RawStream(const std::string& endpoint) {
    sockaddr_storage storage{};
    socklen_t size = 0;
    auto* const address = reinterpret_cast<sockaddr*>(&storage);
    if (endpoint.rfind("ipc://", 0) == 0) {
      auto* const path = reinterpret_cast<sockaddr_un*>(&storage);
      path->sun_family = AF_UNIX;
      const std::string name = endpoint.substr(6);
      std::copy(name.begin(), name.end(), path->sun_path);
      size = sizeof(*path);
    } else {
      auto* const four = reinterpret_cast<sockaddr_in*>(&storage);
      four->sin_family = AF_INET;
      four->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      four->sin_port = htons(
          static_cast<uint16_t>(
              std::stoi(endpoint.substr(endpoint.rfind(':') + 1))));
      size = sizeof(*four);
    }
    fd_ = socket(storage.ss_family, SOCK_STREAM, 0);
    EXPECT_EQ(connect(fd_, address, size), 0) << std::strerror(errno);
  }
  RawStream(const RawStream&) = delete;
  RawStream& operator=(const RawStream&) = delete;
  ~RawStream() {
    close(fd_);
  }
  void send(const std::string& bytes) const {
    // The other side may close at any time.
    static_cast<void>(
        ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == 0);
  }

 private:
  int fd_ = -1;
};

class ZeromqSecurityTest : public ::testing::TestWithParam<Security> {};

INSTANTIATE_TEST_SUITE_P(
    All,
    ZeromqSecurityTest,
    ::testing::Values(Security::kIpc, Security::kCurve, Security::kNone),
    [](const auto& param) {
      return param.param == Security::kIpc  ? "Ipc"
          : param.param == Security::kCurve ? "Curve"
                                            : "None";
    });

TEST_P(ZeromqSecurityTest, ServesTheJob) {
  Node server(config_with(GetParam(), 0), echo);
  EXPECT_TRUE(serves(GetParam(), server));
  EXPECT_EQ(server.num_refused(), 0);
}

TEST_P(ZeromqSecurityTest, ServesTheHostOverIpc) {
  Node server(config_with(GetParam(), 0), echo);
  EXPECT_TRUE(serves(Security::kIpc, server));
}

TEST_P(ZeromqSecurityTest, AnotherTokenIsRefused) {
  Node server(config_with(GetParam(), 0), echo);
  ZeromqConfig config = config_with(GetParam(), 1);
  config.token[15] ^= std::byte{1};
  Node stranger(config);
  stranger.connect(0, reached_by(GetParam(), server));
  stranger.send(0, Direction::kRequest, push(1, 0, 1, bytes_of("x")));
  EXPECT_EQ(refused(server, 1), 1);
  EXPECT_EQ(server.num_received(), 0);
  EXPECT_TRUE(serves(GetParam(), server));
  EXPECT_EQ(stranger.num_received(), 0);
}

TEST_P(ZeromqSecurityTest, AStrangerDoesNotTakeARank) {
  Node server(config_with(GetParam(), 0), echo);
  Node worker(config_with(GetParam(), 1));
  worker.connect(0, reached_by(GetParam(), server));
  worker.send(0, Direction::kRequest, push(1, 0, 1, bytes_of("x")));
  ASSERT_EQ(worker.received(1).size(), 1);
  ZeromqConfig config = config_with(GetParam(), 1);
  config.token.fill(std::byte{0});
  Node stranger(config);
  stranger.connect(0, reached_by(GetParam(), server));
  stranger.send(0, Direction::kRequest, push(1, 0, 2, bytes_of("x"), 2));
  stranger.send(0, Direction::kRequest, push(1, 0, 2, bytes_of("x")));
  EXPECT_EQ(refused(server, 2), 2);
  worker.send(0, Direction::kRequest, push(1, 0, 3, bytes_of("x")));
  EXPECT_EQ(worker.received(2).size(), 2);
}

TEST_P(ZeromqSecurityTest, SurvivesGarbage) {
  Node server(config_with(GetParam(), 0), echo);
  const PeerAddress address = server.address();
  const std::string endpoint =
      GetParam() == Security::kIpc ? address.ipc : address.tcp;
  // The greeting of ZMTP 3.0, of the mechanism NULL.
  std::string greeting = "\xff";
  greeting += std::string(8, '\0') + "\x7f" + '\3' + '\0' + "NULL";
  greeting.resize(64, '\0');
  std::mt19937 random(1);
  std::vector<std::unique_ptr<RawStream>> held;
  for (int i = 0; i < 200; ++i) {
    auto stream = std::make_unique<RawStream>(endpoint);
    std::string bytes = i % 2 == 0 ? greeting : "";
    if (i % 4 == 0) {
      // READY, without properties, and the start of a very long message.
      bytes += std::string("\x04\x06\x05READY", 8);
      bytes += std::string("\x02\x7f\xff\xff\xff\xff\xff\xff\xff", 9);
    }
    for (int j = 0; j < i; ++j) {
      bytes += static_cast<char>(random());
    }
    stream->send(bytes.substr(0, random() % (bytes.size() + 1)));
    if (i % 10 == 0) {
      held.push_back(std::move(stream));
    }
  }
  EXPECT_TRUE(serves(GetParam(), server));
  EXPECT_EQ(server.num_received(), 1);
}

// A client of ZeroMQ that may connect, but sends what is no frame.
TEST(ZeromqSecurityNoneTest, MessagesThatAreNoFramesAreRefused) {
  Node server(config_with(Security::kNone, 0), echo);
  const zeromq::Functions& zmq = zeromq::functions();
  void* const context = zmq.ctx_new();
  void* const dealer = zmq.socket(context, zeromq::kDealer);
  const int linger = 1000;
  zmq.setsockopt(dealer, zeromq::kLinger, &linger, sizeof(linger));
  ASSERT_EQ(zmq.connect(dealer, server.address().tcp.c_str()), 0);
  const auto send = [&](size_t size, bool more) {
    zeromq::RawMessage message{};
    zmq.msg_init_size(&message, size);
    std::memset(zmq.msg_data(&message), 7, size);
    EXPECT_GE(zmq.msg_send(&message, dealer, more ? zeromq::kSendMore : 0), 0);
  };
  for (const size_t parts : {1, 2, 100, 9000}) {
    for (size_t i = 1; i <= parts; ++i) {
      send(i % 70, i < parts);
    }
  }
  send(0, false);
  EXPECT_EQ(refused(server, 5), 5);
  zmq.close(dealer);
  zmq.ctx_term(context);
  EXPECT_EQ(server.num_received(), 0);
  EXPECT_TRUE(serves(Security::kNone, server));
}

TEST(ZeromqCurveTest, AnotherSecretDoesNotConnect) {
  Node server(config_with(Security::kCurve, 0), echo);
  ZeromqConfig config = config_with(Security::kCurve, 1);
  config.secret = "another job's secret";
  Node stranger(config);
  stranger.connect(0, elsewhere(server.address()));
  stranger.send(0, Direction::kRequest, push(1, 0, 1, bytes_of("x")));
  ZeromqConfig plain = config_with(Security::kNone, 2);
  Node plain_stranger(plain);
  plain_stranger.connect(0, elsewhere(server.address()));
  plain_stranger.send(0, Direction::kRequest, push(2, 0, 1, bytes_of("x")));
  sleep_ms(300);
  EXPECT_TRUE(serves(Security::kCurve, server));
  EXPECT_EQ(server.num_received(), 1);
  // They do not come as far as the token.
  EXPECT_EQ(server.num_refused(), 0);
}

// The client knows the server's key but is not on the list of accepted keys.
TEST(ZeromqCurveTest, AnotherClientKeyIsRefused) {
  Node server(config_with(Security::kCurve, 0), echo);
  const auto keys = zeromq::derive_curve_keys("the job's secret");
  const zeromq::Functions& zmq = zeromq::functions();
  const auto try_key = [&](const std::string& public_key,
                           const std::string& secret_key) {
    void* const context = zmq.ctx_new();
    void* const dealer = zmq.socket(context, zeromq::kDealer);
    const int linger = 300;
    zmq.setsockopt(dealer, zeromq::kLinger, &linger, sizeof(linger));
    const auto set = [&](zeromq::Option option, const std::string& key) {
      EXPECT_EQ(zmq.setsockopt(dealer, option, key.c_str(), 41), 0);
    };
    set(zeromq::kCurveServerKey, keys.server_public);
    set(zeromq::kCurvePublicKey, public_key);
    set(zeromq::kCurveSecretKey, secret_key);
    EXPECT_EQ(zmq.connect(dealer, server.address().tcp.c_str()), 0);
    zeromq::RawMessage message{};
    zmq.msg_init_size(&message, 10);
    EXPECT_GE(zmq.msg_send(&message, dealer, 0), 0);
    zmq.close(dealer);
    zmq.ctx_term(context);
  };
  std::array<char, zeromq::kKeyText> public_key{};
  std::array<char, zeromq::kKeyText> secret_key{};
  ASSERT_EQ(zmq.curve_keypair(public_key.data(), secret_key.data()), 0);
  try_key(public_key.data(), secret_key.data());
  sleep_ms(100);
  EXPECT_EQ(server.num_refused(), 0);
  // It arrives, and is no frame.
  try_key(keys.client_public, keys.client_secret);
  EXPECT_EQ(refused(server, 1), 1);
}

TEST(ZeromqCurveTest, KeysDependOnTheSecretOnly) {
  const auto keys = zeromq::derive_curve_keys("a");
  const auto same = zeromq::derive_curve_keys("a");
  const auto other = zeromq::derive_curve_keys("b");
  EXPECT_EQ(keys.server_secret, same.server_secret);
  EXPECT_EQ(keys.client_public, same.client_public);
  const std::set<std::string> distinct{
      keys.server_public,
      keys.server_secret,
      keys.client_public,
      keys.client_secret,
      other.server_public,
      other.server_secret,
      other.client_public,
      other.client_secret};
  EXPECT_EQ(distinct.size(), 8);
  for (const auto& key : distinct) {
    EXPECT_EQ(key.size(), 40);
  }
}

} // namespace
} // namespace torchkv::dist

// ZeromqTransport: the end of another process is noticed, however it ends.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "dist/transport/socket_folder.h"
#include "node.h"

namespace torchkv::dist {
namespace {

using namespace testing; // NOLINT(google-build-using-namespace)

// A process that has been forked, and killed with this one at the latest. What
// `run` returns comes as line().
class Child {
 public:
  explicit Child(const std::function<std::string()>& run) {
    std::array<int, 2> ends{};
    EXPECT_EQ(pipe(ends.data()), 0);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[0]);
      const std::string line = run() + '\n';
      const bool written = write(ends[1], line.data(), line.size()) ==
          static_cast<ssize_t>(line.size());
      while (written) {
        pause();
      }
      _exit(1);
    }
    close(ends[1]);
    char letter = 0;
    while (read(ends[0], &letter, 1) == 1 && letter != '\n') {
      line_ += letter;
    }
    close(ends[0]);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    kill();
  }
  const std::string& line() const {
    return line_;
  }
  void signal(int number) const {
    ::kill(pid_, number);
  }
  void kill() {
    if (pid_ > 0) {
      signal(SIGKILL);
      waitpid(pid_, nullptr, 0);
      pid_ = 0;
    }
  }
  pid_t pid() const {
    return pid_;
  }

 private:
  pid_t pid_ = 0;
  std::string line_;
};

std::string line_of(const PeerAddress& address) {
  std::ostringstream text;
  text << address.ipc << ' ' << (address.tcp.empty() ? "-" : address.tcp) << ' '
       << address.pid << ' ' << address.started << ' ' << address.host;
  return text.str();
}

PeerAddress address_of(const std::string& text) {
  std::istringstream fields(text);
  PeerAddress address;
  fields >> address.ipc >> address.tcp >> address.pid >> address.started;
  fields.get();
  std::getline(fields, address.host);
  return address;
}

ZeromqConfig config_on_tcp(int32_t rank) {
  ZeromqConfig config = config_of(rank);
  config.security = Security::kNone;
  config.tcp_host = "127.0.0.1";
  return config;
}

// Rank 0 in a process of its own.
std::string serve_in_child(const Node::Serve& serve) {
  auto* const node = new Node(config_on_tcp(0), serve);
  return line_of(node->address());
}

std::string echo_in_child() {
  return serve_in_child(echo);
}

double seconds_until_lost(Node& node, const std::function<void()>& event) {
  const auto begin = std::chrono::steady_clock::now();
  event();
  EXPECT_EQ(node.lost(1), (std::vector<int32_t>{0}));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

void expect_answer(Node& node, int64_t opno) {
  node.send(0, Direction::kRequest, push(1, 0, opno, bytes_of("x")));
  EXPECT_EQ(
      node.received(static_cast<size_t>(opno)).size(),
      static_cast<size_t>(opno));
}

// As set for a socket of this process; 0 if it is none of TCP.
int tcp_option(int file, int level, int name) {
  int value = 0;
  socklen_t size = sizeof(value);
  return getsockopt(file, level, name, &value, &size) == 0 ? value : 0;
}

class ZeromqPeerTest : public ::testing::TestWithParam<bool> {
 protected:
  static PeerAddress reached(const Child& child) {
    const PeerAddress address = address_of(child.line());
    return GetParam() ? elsewhere(address) : address;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Sockets,
    ZeromqPeerTest,
    ::testing::Bool(),
    [](const auto& param) { return param.param ? "Tcp" : "Ipc"; });

TEST_P(ZeromqPeerTest, AKilledProcessIsLost) {
  Child child(echo_in_child);
  Node node(config_on_tcp(1));
  node.connect(0, reached(child));
  expect_answer(node, 1);
  EXPECT_LT(seconds_until_lost(node, [&] { child.kill(); }), 1);
  // What is sent then is lost, and does not delay the end.
  node.send(0, Direction::kRequest, push(1, 0, 2, bytes_of("x")));
  node.close();
  EXPECT_EQ(node.lost(1).size(), 1);
}

TEST_P(ZeromqPeerTest, AStoppedProcessIsNotLostAtOnce) {
  Child child(echo_in_child);
  Node node(config_on_tcp(1));
  node.connect(0, reached(child));
  expect_answer(node, 1);
  child.signal(SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  child.signal(SIGCONT);
  expect_answer(node, 2);
}

// A DataLoader's worker, say, which keeps copies of all descriptors. Over TCP
// only the cores' heartbeats tell.
TEST(ZeromqProcessTest, AForkedChildOfAKilledProcessDoesNotHideItsEnd) {
  // Once it has a connection, it forks.
  const auto fork_and_answer =
      [](Node& node, int32_t rank, const Frame& frame) {
        const pid_t grandchild = fork();
        if (grandchild == 0) {
          sleep(30);
          _exit(0);
        }
        node.transport().send(
            rank,
            Direction::kAnswer,
            answer_to(frame, bytes_of(std::to_string(grandchild))));
      };
  Child child([&] { return serve_in_child(fork_and_answer); });
  Node node(config_on_tcp(1));
  node.connect(0, address_of(child.line()));
  expect_answer(node, 1);
  const std::string grandchild = text_of(node.received(1)[0].frame[0].payload);
  EXPECT_LT(seconds_until_lost(node, [&] { child.kill(); }), 1);
  EXPECT_EQ(kill(std::stoi(grandchild), SIGKILL), 0);
}

TEST(ZeromqProcessTest, BothEndsOfATcpConnectionNoticeThatItIsDead) {
  Node server(config_on_tcp(0), echo);
  Node node(config_on_tcp(1));
  node.connect(0, elsewhere(server.address()));
  expect_answer(node, 1);
  int num_connected = 0;
  for (int file = 0; file < 1024; ++file) {
    sockaddr_storage peer{};
    socklen_t size = sizeof(peer);
    if (getpeername(file, reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
        peer.ss_family != AF_INET) {
      continue;
    }
    ++num_connected;
    EXPECT_EQ(tcp_option(file, IPPROTO_TCP, TCP_USER_TIMEOUT), 60'000);
    EXPECT_EQ(tcp_option(file, SOL_SOCKET, SO_KEEPALIVE), 1);
    EXPECT_EQ(tcp_option(file, IPPROTO_TCP, TCP_KEEPIDLE), 15);
    EXPECT_EQ(tcp_option(file, IPPROTO_TCP, TCP_KEEPINTVL), 15);
    EXPECT_EQ(tcp_option(file, IPPROTO_TCP, TCP_KEEPCNT), 3);
  }
  EXPECT_EQ(num_connected, 2);
}

TEST(ZeromqProcessTest, AProcessThatHasEndedIsLostAtOnce) {
  Child child(echo_in_child);
  PeerAddress address = address_of(child.line());
  child.kill();
  Node node(config_on_tcp(1));
  node.connect(0, address);
  EXPECT_EQ(node.lost(1), (std::vector<int32_t>{0}));
}

TEST(ZeromqProcessTest, AnotherProcessOfTheSameNumberIsNotTakenForIt) {
  PeerAddress address = own_process();
  EXPECT_FALSE(ProcessWatch(address).has_ended());
  address.started += 1;
  EXPECT_TRUE(ProcessWatch(address).has_ended());
}

TEST(ZeromqProcessTest, AForkedChildLeavesTheSocketsAlone) {
  Node server(config_of(0), echo);
  auto worker = std::make_unique<Node>(config_of(1));
  worker->connect(0, server.address());
  auto raw = std::make_unique<ZeromqTransport>(config_of(2));
  raw->connect(0, server.address());
  {
    Child child([&] {
      worker->transport().close();
      server.transport().close();
      raw.reset();
      return std::string("closed");
    });
    EXPECT_EQ(child.line(), "closed");
  }
  struct stat status{};
  EXPECT_EQ(stat(folder_of(worker->address()).c_str(), &status), 0);
  worker->send(0, Direction::kRequest, push(1, 0, 1, bytes_of("x")));
  EXPECT_EQ(worker->received(1).size(), 1);
  raw->send(0, Direction::kRequest, push(2, 0, 1, bytes_of("x")));
  EXPECT_EQ(server.received(2).size(), 2);
}

TEST(SocketFolderTest, WhatACrashHasLeftIsRemoved) {
  std::string left;
  {
    Child child([] { return (new SocketFolder())->path(); });
    left = child.line();
    struct stat status{};
    SocketFolder folder;
    EXPECT_EQ(stat(left.c_str(), &status), 0); // its owner lives
    folder.remove();
    EXPECT_NE(stat(folder.path().c_str(), &status), 0);
  }
  SocketFolder folder;
  struct stat status{};
  EXPECT_NE(stat(left.c_str(), &status), 0);
  folder.remove();
}

TEST(SocketFolderTest, AFolderThatIsTooLongIsNotUsed) {
  const char* const known = std::getenv("TMPDIR");
  const std::string old = known == nullptr ? "" : known;
  const std::string base =
      ::testing::TempDir() + "torchkv-test-" + std::string(80, 'x');
  mkdir(base.c_str(), 0700);
  setenv("TMPDIR", base.c_str(), 1);
  SocketFolder folder;
  EXPECT_EQ(folder.path().find(base), std::string::npos);
  EXPECT_LT(folder.endpoint().size(), 107);
  folder.remove();
  rmdir(base.c_str());
  if (known == nullptr) {
    unsetenv("TMPDIR");
  } else {
    setenv("TMPDIR", old.c_str(), 1);
  }
}

} // namespace
} // namespace torchkv::dist

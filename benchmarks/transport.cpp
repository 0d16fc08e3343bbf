// What the transport between processes takes: a round trip of 64 bytes, and
// pieces of 1 MB one way. Two processes of one host; the caller's thread sends,
// the transport's thread receives and wakes it, as in a store.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dist/transport/zeromq_transport.h"

namespace {

using namespace torchkv::dist; // NOLINT(google-build-using-namespace)

constexpr size_t kPieceBytes = size_t{1} << 20;

double now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Answers each push with its payload if that is short, or without one.
class Node : public Transport::Handler {
 public:
  explicit Node(int32_t rank, Security security)
      : transport(config(rank, security)) {}

  void poll(double timeout) {
    std::unique_lock lock(mutex);
    transport.poll(lock, timeout, *this);
  }
  void on_frame(int32_t rank, Direction direction, Frame frame) override {
    if (direction == Direction::kAnswer) {
      ++num_answers;
      changed.notify_all();
      return;
    }
    Message answer;
    answer.kind = Kind::kDone;
    answer.header = frame[0].header;
    answer.opno = frame[0].opno;
    if (frame[0].payload.size() < kPieceBytes) {
      answer.kind = Kind::kValue;
      answer.pieces = 1;
      answer.index = 0;
      answer.payload = frame[0].payload;
    }
    transport.send(rank, Direction::kAnswer, {std::move(answer)});
  }
  void on_peer_lost(int32_t /*rank*/) override {}

  std::mutex mutex;
  std::condition_variable changed;
  int64_t num_answers = 0;
  ZeromqTransport transport;

 private:
  static ZeromqConfig config(int32_t rank, Security security) {
    ZeromqConfig config;
    config.rank = rank;
    config.limits.num_workers = 2;
    config.limits.num_servers = 2;
    config.security = security;
    config.secret = "of the benchmark";
    config.tcp_host = "127.0.0.1";
    return config;
  }
};

class Caller {
 public:
  explicit Caller(Node& node) : node_(node) {}

  void push(const Blob& payload) {
    Message message;
    message.kind = Kind::kPush;
    message.header.rank = 1;
    message.header.inc = 1;
    message.slice = {torchkv::Key(7), 0};
    message.opno = ++opno_;
    message.pieces = 1;
    message.index = 0;
    message.payload = payload;
    const std::lock_guard lock(node_.mutex);
    node_.transport.send(0, Direction::kRequest, {std::move(message)});
  }
  // Until at most so many pushes have no answer.
  void wait(int64_t window) {
    std::unique_lock lock(node_.mutex);
    const bool answered =
        node_.changed.wait_for(lock, std::chrono::seconds(20), [&] {
          return opno_ - node_.num_answers <= window;
        });
    if (!answered) {
      std::fprintf(stderr, "no answer\n");
      std::_Exit(1);
    }
  }

 private:
  Node& node_;
  int64_t opno_ = 0;
};

void measure(const char* name, Node& node, const PeerAddress& server) {
  {
    const std::lock_guard lock(node.mutex);
    node.transport.connect(0, server);
  }
  bool stop = false;
  std::thread thread([&] {
    while (true) {
      node.poll(1);
      const std::lock_guard lock(node.mutex);
      if (stop) {
        return;
      }
    }
  });
  Caller caller(node);
  const auto bytes = std::make_shared<std::vector<char>>(kPieceBytes, 'x');
  std::vector<double> times;
  for (int i = 0; i < 20000; ++i) {
    const double begin = now();
    caller.push(Blob(bytes, bytes->data(), 64));
    caller.wait(0);
    times.push_back(now() - begin);
  }
  std::sort(times.begin(), times.end());
  std::printf(
      "%-6s 64 bytes there and back: least %.1f, median %.1f, 99%% %.1f us\n",
      name,
      times[0] * 1e6,
      times[times.size() / 2] * 1e6,
      times[times.size() * 99 / 100] * 1e6);
  for (const int64_t window : {1, 2, 3, 8}) {
    std::vector<double> rates;
    for (int round = 0; round < 7; ++round) {
      constexpr int kPieces = 200;
      const double begin = now();
      for (int i = 0; i < kPieces; ++i) {
        caller.push(Blob(bytes, bytes->data(), bytes->size()));
        caller.wait(window - 1);
      }
      caller.wait(0);
      rates.push_back(kPieces * kPieceBytes / (now() - begin) * 1e-9);
    }
    std::sort(rates.begin(), rates.end());
    std::printf(
        "%-6s pieces of 1 MB, %d in flight: median %.2f, best %.2f GB/s\n",
        name,
        static_cast<int>(window),
        rates[rates.size() / 2],
        rates.back());
  }
  {
    const std::lock_guard lock(node.mutex);
    stop = true;
  }
  node.transport.wake();
  thread.join();
  node.transport.close();
}

void run(const char* name, Security security) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) {
    std::abort();
  }
  const pid_t server = fork();
  if (server == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Node node(0, security);
    const PeerAddress& address = node.transport.address();
    const std::string text =
        (security == Security::kIpc ? address.ipc : address.tcp) + '\n';
    if (write(ends[1], text.data(), text.size()) < 0) {
      _exit(1);
    }
    while (true) {
      node.poll(1);
    }
  }
  close(ends[1]);
  std::string text;
  for (char letter = 0; read(ends[0], &letter, 1) == 1 && letter != '\n';) {
    text += letter;
  }
  close(ends[0]);
  Node node(1, security);
  PeerAddress address;
  address.host =
      security == Security::kIpc ? node.transport.address().host : "";
  (security == Security::kIpc ? address.ipc : address.tcp) = text;
  measure(name, node, address);
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
}

} // namespace

int main() {
  run("ipc", Security::kIpc);
  run("tcp", Security::kNone);
  run("curve", Security::kCurve);
  return 0;
}

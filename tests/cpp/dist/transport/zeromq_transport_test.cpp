// ZeromqTransport: what is sent arrives, in order, over both kinds of sockets,
// from several threads; nothing is left at close.
#include "dist/transport/zeromq_transport.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../error_text.h"
#include "dist/transport/available_memory.h"
#include "node.h"

namespace torchkv::dist {
namespace {

using ::torchkv::testing::error_text;
using namespace testing; // NOLINT(google-build-using-namespace)

double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  const std::chrono::duration<double> time =
      std::chrono::steady_clock::now() - begin;
  return time.count();
}

ZeromqConfig tcp_config(int32_t rank) {
  ZeromqConfig config = config_of(rank);
  config.security = Security::kNone;
  config.tcp_host = "127.0.0.1";
  return config;
}

enum class Way : uint8_t { kIpc, kTcp, kMemory };

std::string name_of(Way way) {
  return way == Way::kIpc ? "Ipc" : way == Way::kTcp ? "Tcp" : "Memory";
}

class ZeromqTransportTest : public ::testing::TestWithParam<Way> {
 protected:
  ZeromqConfig config(int32_t rank) const {
    ZeromqConfig result =
        GetParam() == Way::kTcp ? tcp_config(rank) : config_of(rank);
    if (GetParam() == Way::kMemory) {
      result.memory = SharedMemory::create();
    }
    return result;
  }
  PeerAddress reached(const Node& node) const {
    return GetParam() == Way::kTcp ? elsewhere(node.address()) : node.address();
  }
};

INSTANTIATE_TEST_SUITE_P(
    Ways,
    ZeromqTransportTest,
    ::testing::Values(Way::kIpc, Way::kTcp, Way::kMemory),
    [](const auto& param) { return name_of(param.param); });

TEST_P(ZeromqTransportTest, AnswersReachTheRankThatHasAsked) {
  Node server(config(0), echo);
  Node one(config(1));
  Node two(config(2));
  for (auto* const node : {&one, &two}) {
    node->connect(0, reached(server));
  }
  one.send(0, Direction::kRequest, push(1, 0, 11, bytes_of("of one")));
  two.send(0, Direction::kRequest, push(2, 0, 22, bytes_of("of two")));
  const auto first = one.received(1);
  ASSERT_EQ(first.size(), 1);
  EXPECT_EQ(first[0].rank, 0);
  EXPECT_EQ(first[0].direction, Direction::kAnswer);
  EXPECT_EQ(first[0].frame[0].opno, 11);
  EXPECT_EQ(text_of(first[0].frame[0].payload), "of one");
  const auto second = two.received(1);
  ASSERT_EQ(second.size(), 1);
  EXPECT_EQ(second[0].frame[0].opno, 22);
  const auto requests = server.received(2);
  ASSERT_EQ(requests.size(), 2);
  EXPECT_EQ(requests[0].direction, Direction::kRequest);
  EXPECT_EQ(requests[0].rank + requests[1].rank, 3);
  EXPECT_EQ(server.num_refused(), 0);
}

TEST_P(ZeromqTransportTest, ManyLargePiecesArriveInOrder) {
  if (available_memory() < size_t{1024} << 20U) {
    GTEST_SKIP() << "too little memory";
  }
  constexpr size_t kPieces = 100;
  constexpr size_t kBytes = size_t{1} << 20;
  const auto memory = std::make_shared<std::vector<uint64_t>>(
      kPieces * kBytes / sizeof(uint64_t));
  for (size_t i = 0; i < memory->size(); ++i) {
    (*memory)[i] = i;
  }
  Node server(config(0), echo);
  Node worker(config(1));
  worker.connect(0, reached(server));
  const Blob all(memory, memory->data(), kPieces * kBytes);
  for (size_t i = 0; i < kPieces; ++i) {
    worker.send(
        0,
        Direction::kRequest,
        push(1, 0, static_cast<int64_t>(i) + 1, all.slice(i * kBytes, kBytes)));
  }
  const auto answers = worker.received(kPieces);
  ASSERT_EQ(answers.size(), kPieces);
  for (size_t i = 0; i < kPieces; ++i) {
    const Message& answer = answers[i].frame[0];
    ASSERT_EQ(answer.opno, static_cast<int64_t>(i) + 1);
    ASSERT_EQ(answer.payload.size(), kBytes);
    ASSERT_EQ(
        std::memcmp(answer.payload.data(), all.data() + (i * kBytes), kBytes),
        0);
  }
}

TEST_P(ZeromqTransportTest, ReceivedPayloadsOutliveTheTransport) {
  std::vector<Node::Received> received;
  const std::string text(100000, 'x');
  {
    Node server(config(0));
    Node worker(config(1));
    worker.connect(0, reached(server));
    worker.send(0, Direction::kRequest, push(1, 0, 1, bytes_of(text)));
    received = server.received(1);
  }
  ASSERT_EQ(received.size(), 1);
  EXPECT_EQ(text_of(received[0].frame[0].payload), text);
}

TEST_P(ZeromqTransportTest, LargePayloadsAreReleasedWhenTheyHaveLeft) {
  std::weak_ptr<const std::string> memory;
  Node server(config(0));
  Node worker(config(1));
  worker.connect(0, reached(server));
  {
    const auto owner = std::make_shared<const std::string>(1 << 20, 'x');
    memory = owner;
    worker.send(
        0,
        Direction::kRequest,
        push(1, 0, 1, Blob(owner, owner->data(), owner->size())));
  }
  server.received(1);
  worker.close();
  EXPECT_TRUE(memory.expired());
}

TEST(ZeromqTransportMemoryTest, PayloadsInSharedMemoryAreNotCopied) {
  ZeromqConfig server_config = config_of(0);
  ZeromqConfig worker_config = config_of(1);
  server_config.memory = SharedMemory::create();
  worker_config.memory = SharedMemory::create();
  auto server = std::make_unique<Node>(server_config);
  Node worker(worker_config);
  server->connect(1, worker.address());
  worker.connect(0, server->address());
  const auto used = [&] { return worker_config.memory->num_used(); };
  const size_t size = size_t{1} << 20U;
  char* letters = nullptr;
  std::vector<Node::Received> received;
  // Until the two have each other's descriptors, payloads are sent.
  for (int64_t opno = 1; opno < 2000 && used() == 0; ++opno) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    server->clear();
    auto block = worker_config.memory->allocate(size);
    letters = static_cast<char*>(block.get());
    std::memset(letters, 'a', size);
    worker.send(
        0,
        Direction::kRequest,
        push(1, 0, opno, Blob(std::move(block), letters, size)));
    received = server->received(1);
    ASSERT_EQ(received.size(), 1);
    EXPECT_EQ(text_of(received[0].frame[0].payload), std::string(size, 'a'));
    // A socket soon lets go of what it has sent.
    for (int i = 0; i < 100 && used() != 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  letters[0] = 'b'; // the server reads this memory
  EXPECT_EQ(text_of(received[0].frame[0].payload)[0], 'b');
  EXPECT_EQ(used(), size);
  received.clear();
  server->clear();
  server.reset();
  for (int i = 0; i < 2000 && used() != 0; ++i) {
    worker.reclaim();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(used(), 0);
}

// Each thread waits for the answer to its request before the next one, so an
// event that is missed when another thread uses the socket stops it.
TEST_P(ZeromqTransportTest, ThreadsSendUnderTheMutex) {
  constexpr int64_t kThreads = 4;
  constexpr int64_t kRequests = 2000;
  std::vector<std::unique_ptr<Node>> nodes;
  for (int32_t rank = 0; rank < 2; ++rank) {
    nodes.push_back(std::make_unique<Node>(config(rank), echo));
  }
  nodes[0]->connect(1, reached(*nodes[1]));
  nodes[1]->connect(0, reached(*nodes[0]));
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const auto rank = static_cast<int32_t>(i % 2);
      for (int64_t j = 0; j < kRequests; ++j) {
        nodes[static_cast<size_t>(rank)]->send(
            1 - rank,
            Direction::kRequest,
            push(rank, 1 - rank, (i * kRequests) + j + 1, bytes_of("x")));
        if (j % 64 == 0) {
          std::this_thread::yield();
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (const auto& node : nodes) {
    // Requests and answers.
    const auto received = node->received(2 * kThreads * kRequests / 2);
    ASSERT_EQ(received.size(), 2 * kThreads * kRequests / 2);
    std::map<int64_t, int64_t> last; // of a thread and direction
    std::set<std::pair<Direction, int64_t>> distinct;
    for (const auto& [rank, direction, frame] : received) {
      const int64_t opno = frame[0].opno - 1;
      const bool is_answer = direction == Direction::kAnswer;
      auto& previous = last[(opno / kRequests * 2) + (is_answer ? 1 : 0)];
      if (GetParam() != Way::kMemory) {
        EXPECT_GE(opno % kRequests, previous);
      }
      previous = (opno % kRequests) + 1;
      distinct.emplace(direction, opno);
    }
    EXPECT_EQ(distinct.size(), received.size());
  }
}

TEST_P(ZeromqTransportTest, NoRoundTripMissesItsAnswer) {
  Node server(config(0), echo);
  Node worker(config(1));
  worker.connect(0, reached(server));
  const double time = seconds_of([&] {
    for (int64_t i = 1; i <= 5000; ++i) {
      worker.send(0, Direction::kRequest, push(1, 0, i, bytes_of("x")));
      ASSERT_EQ(worker.received(1).size(), 1) << i;
      worker.clear();
    }
  });
  EXPECT_LT(time, 60); // of one poll()
}

// Collects what one thread polls.
class Collector : public Transport::Handler {
 public:
  void on_frame(int32_t /*rank*/, Direction /*direction*/, Frame frame)
      override {
    opnos.push_back(frame[0].opno);
  }
  void on_peer_lost(int32_t /*rank*/) override {}
  std::vector<int64_t> opnos;
};

TEST_P(ZeromqTransportTest, WhatASendNoticesIsNotMissed) {
  Node server(config(0), echo);
  ZeromqTransport worker(config(1));
  Collector collector;
  std::mutex mutex;
  std::unique_lock lock(mutex);
  worker.connect(0, reached(server));
  const auto send = [&](int64_t opno) {
    worker.send(0, Direction::kRequest, push(1, 0, opno, bytes_of("x")));
  };
  const auto poll_until = [&](size_t count) {
    const auto end = std::chrono::steady_clock::now() + Node::patience();
    while (collector.opnos.size() < count &&
           std::chrono::steady_clock::now() < end) {
      worker.poll(lock, 20, collector);
    }
  };
  send(1);
  poll_until(1);
  worker.poll(lock, 0.1, collector); // all is quiet
  send(2);
  server.received(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  // The answer has arrived. This looks at the socket's events, among them that
  // one, of which the descriptor tells only once.
  send(3);
  EXPECT_LT(seconds_of([&] { poll_until(3); }), 10);
  EXPECT_EQ(collector.opnos, (std::vector<int64_t>{1, 2, 3}));
}

TEST_P(ZeromqTransportTest, AnswersForOtherRanksAreRefused) {
  Node server(config(0), [](Node& node, int32_t rank, const Frame& frame) {
    Frame answer = answer_to(frame);
    if (frame[0].opno == 1) {
      answer[0].header.rank = 2;
    }
    node.transport().send(rank, Direction::kAnswer, std::move(answer));
  });
  Node worker(config(1));
  worker.connect(0, reached(server));
  for (int64_t opno : {1, 2}) {
    worker.send(0, Direction::kRequest, push(1, 0, opno, bytes_of("x")));
  }
  const auto received = worker.received(1);
  ASSERT_EQ(received.size(), 1);
  EXPECT_EQ(received[0].frame[0].opno, 2);
  EXPECT_EQ(worker.num_refused(), 1);
}

TEST_P(ZeromqTransportTest, GoodbyesLeaveAtClose) {
  Node server(config(0));
  {
    Node worker(config(1));
    worker.connect(0, reached(server));
    for (int64_t i = 1; i <= 100; ++i) {
      worker.send(0, Direction::kRequest, push(1, 0, i, bytes_of("bye")));
    }
  }
  EXPECT_EQ(server.received(100).size(), 100);
}

TEST_P(ZeromqTransportTest, CloseIsPromptAndLeavesNoFile) {
  Node node(config(0));
  const std::string folder = folder_of(node.address());
  struct stat status{};
  ASSERT_EQ(stat(folder.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777U, 0700U);
  // Nobody listens there any more.
  PeerAddress gone;
  {
    const Node other(config(1));
    gone = reached(other);
  }
  gone.pid = 0;
  node.connect(1, gone);
  node.send(1, Direction::kRequest, push(0, 1, 1, bytes_of("lost")));
  EXPECT_LT(seconds_of([&] { node.close(); }), 2);
  EXPECT_NE(stat(folder.c_str(), &status), 0);
}

TEST_P(ZeromqTransportTest, OwnFramesNeedNoSocket) {
  Node node(config(3));
  node.send(3, Direction::kRequest, push(3, 3, 5, bytes_of("mine")));
  node.transport().wake();
  const auto received = node.received(1);
  ASSERT_EQ(received.size(), 1);
  EXPECT_EQ(received[0].rank, 3);
  EXPECT_EQ(received[0].frame[0].opno, 5);
}

TEST_P(ZeromqTransportTest, AnswersGoToTheirIncarnation) {
  Node server(config(0), echo);
  Node old_worker(config(1));
  Node new_worker(config(1));
  const auto ask = [&](Node& worker, int64_t opno, int64_t inc) {
    worker.send(0, Direction::kRequest, push(1, 0, opno, bytes_of("x"), inc));
    EXPECT_EQ(server.received(static_cast<size_t>(opno)).size(), opno);
  };
  old_worker.connect(0, reached(server));
  ask(old_worker, 1, 1);
  new_worker.connect(0, reached(server));
  ask(new_worker, 2, 2);
  ask(old_worker, 3, 1);
  ask(new_worker, 4, 2);
  const auto numbers = [](Node& node) {
    std::vector<int64_t> result;
    for (const auto& received : node.received(2)) {
      result.push_back(received.frame[0].opno);
    }
    return result;
  };
  EXPECT_EQ(numbers(old_worker), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(numbers(new_worker), (std::vector<int64_t>{2, 4}));
}

TEST_P(ZeromqTransportTest, ConnectAgainReplacesThePeer) {
  auto first = std::make_unique<Node>(config(0), echo);
  Node worker(config(1));
  worker.connect(0, reached(*first));
  worker.send(0, Direction::kRequest, push(1, 0, 1, bytes_of("x")));
  EXPECT_EQ(worker.received(1).size(), 1);
  first.reset();
  EXPECT_EQ(worker.lost(1), (std::vector<int32_t>{0}));
  Node second(config(0), echo);
  worker.connect(0, reached(second));
  worker.send(0, Direction::kRequest, push(1, 0, 2, bytes_of("x")));
  const auto received = worker.received(2);
  ASSERT_EQ(received.size(), 2);
  EXPECT_EQ(received[1].frame[0].opno, 2);
  EXPECT_EQ(worker.lost(1).size(), 1);
}

TEST(ZeromqTransportAddressTest, IpcHasNoNetwork) {
  ZeromqConfig config = tcp_config(0);
  config.security = Security::kIpc;
  Node node(config);
  EXPECT_EQ(node.address().tcp, "");
  EXPECT_NE(
      error_text<c10::Error>([&] {
        node.connect(2, elsewhere({}));
      }).find("rank 2 is elsewhere"),
      std::string::npos);
}

TEST(ZeromqTransportAddressTest, APortIsChosen) {
  const Node node(tcp_config(0));
  const std::string tcp = node.address().tcp;
  EXPECT_EQ(tcp.rfind("tcp://127.0.0.1:", 0), 0) << tcp;
  EXPECT_GT(std::stoi(tcp.substr(tcp.rfind(':') + 1)), 0);
}

TEST(ZeromqTransportAddressTest, Ipv6) {
  ZeromqConfig config = tcp_config(0);
  config.tcp_host = "::1";
  std::unique_ptr<Node> server;
  try {
    server = std::make_unique<Node>(config, echo);
  } catch (const c10::Error& error) {
    GTEST_SKIP() << "no IPv6: " << error.what_without_backtrace();
  }
  Node worker(tcp_config(1));
  worker.connect(0, elsewhere(server->address()));
  worker.send(0, Direction::kRequest, push(1, 0, 1, bytes_of("x")));
  EXPECT_EQ(worker.received(1).size(), 1);
}

} // namespace
} // namespace torchkv::dist

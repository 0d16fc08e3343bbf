// DirectTransport: frames of a process to itself.
#include "dist/transport/direct_transport.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../error_text.h"
#include "node.h"

namespace torchkv::dist {
namespace {

using ::torchkv::testing::error_text;
using namespace testing; // NOLINT(google-build-using-namespace)

// Answers the first requests.
class Echo : public Transport::Handler {
 public:
  Echo(DirectTransport& transport, size_t num_answers)
      : transport_(transport), num_answers_(num_answers) {}
  void on_frame(int32_t rank, Direction direction, Frame frame) override {
    EXPECT_EQ(rank, 2);
    if (direction == Direction::kRequest && num_answers_ > 0) {
      --num_answers_;
      transport_.send(rank, Direction::kAnswer, answer_to(frame));
      transport_.deliver(*this); // does nothing
    }
    log.push_back(
        (direction == Direction::kRequest ? "request " : "answer ") +
        std::to_string(frame[0].opno));
  }
  void on_peer_lost(int32_t rank) override {
    log.push_back("lost " + std::to_string(rank));
  }

  std::vector<std::string> log;

 private:
  DirectTransport& transport_;
  size_t num_answers_;
};

TEST(DirectTransportTest, HandsOverInOrder) {
  DirectTransport transport(2);
  Echo handler(transport, 2);
  const Blob payload = bytes_of("x");
  for (int64_t i = 1; i <= 3; ++i) {
    transport.send(2, Direction::kRequest, push(2, 2, i, payload));
  }
  transport.send(1, Direction::kRequest, push(2, 1, 4, payload)); // lost
  EXPECT_TRUE(handler.log.empty());
  transport.deliver(handler);
  EXPECT_EQ(
      handler.log,
      (std::vector<std::string>{
          "request 1", "request 2", "request 3", "answer 1", "answer 2"}));
}

TEST(DirectTransportTest, PayloadsAreNotCopied) {
  DirectTransport transport(2);
  struct Keep : Transport::Handler {
    void on_frame(int32_t /*rank*/, Direction /*direction*/, Frame frame)
        override {
      data = frame[0].payload.data();
    }
    void on_peer_lost(int32_t /*rank*/) override {}
    const std::byte* data = nullptr;
  } keep;
  const Blob payload = bytes_of("x");
  transport.send(2, Direction::kRequest, push(2, 2, 1, payload));
  transport.deliver(keep);
  EXPECT_EQ(keep.data, payload.data());
}

TEST(DirectTransportTest, PollWaitsForWake) {
  DirectTransport transport(2);
  Echo handler(transport, 0);
  std::mutex mutex;
  std::unique_lock lock(mutex);
  transport.wake();
  transport.poll(lock, 60, handler); // returns at once
  std::thread sender([&] {
    const std::lock_guard guard(mutex); // only while poll() waits
    transport.send(2, Direction::kRequest, push(2, 2, 9, bytes_of("x")));
    transport.wake();
  });
  while (handler.log.empty()) {
    transport.poll(lock, 60, handler);
  }
  EXPECT_TRUE(lock.owns_lock());
  EXPECT_EQ(handler.log, (std::vector<std::string>{"request 9"}));
  lock.unlock();
  sender.join();
  lock.lock();
  const auto begin = std::chrono::steady_clock::now();
  transport.poll(lock, 0.05, handler);
  EXPECT_GE(
      std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(45));
}

TEST(DirectTransportTest, HasNoPeers) {
  DirectTransport transport(2);
  transport.connect(2, transport.address());
  EXPECT_EQ(
      error_text<c10::Error>([&] { transport.connect(0, PeerAddress()); }),
      "expected a job of one process");
  transport.disconnect(0);
  transport.close();
}

} // namespace
} // namespace torchkv::dist

#include "dist/transport/outbox.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../error_text.h"

namespace torchkv::dist {
namespace {

using ::torchkv::testing::error_text;

Blob blob_of(std::string text) {
  auto owner = std::make_shared<const std::string>(std::move(text));
  const auto* const data = owner->data();
  const size_t size = owner->size();
  return {std::move(owner), data, size};
}

std::vector<std::string> texts_of(const RingMessage& message) {
  std::vector<std::string> result;
  for (const auto& part : message.parts) {
    result.emplace_back(
        reinterpret_cast<const char*>(part.data()), part.size());
  }
  return result;
}

class OutboxTest : public ::testing::Test {
 protected:
  bool put(const std::vector<std::string>& texts) {
    std::vector<Blob> parts;
    parts.reserve(texts.size());
    for (const auto& text : texts) {
      parts.push_back(blob_of(text));
    }
    return put_message(*sender, *receiver, Direction::kAnswer, parts);
  }
  std::optional<RingMessage> take() {
    return take_message(*receiver, *sender);
  }
  const std::unique_ptr<Outbox> sender = std::make_unique<Outbox>();
  const std::unique_ptr<Outbox> receiver = std::make_unique<Outbox>();
};

TEST_F(OutboxTest, MessagesArriveInOrderAndOnce) {
  EXPECT_FALSE(take().has_value());
  EXPECT_TRUE(put({"a", "", "bcd"}));
  EXPECT_TRUE(put({}));
  EXPECT_TRUE(put({std::string(1000, 'x')}));
  EXPECT_TRUE(has_message(*receiver, *sender));
  const auto first = take();
  EXPECT_EQ(first->direction, Direction::kAnswer);
  EXPECT_EQ(texts_of(*first), (std::vector<std::string>{"a", "", "bcd"}));
  EXPECT_EQ(texts_of(*take()), std::vector<std::string>());
  EXPECT_EQ(
      texts_of(*take()), (std::vector<std::string>{std::string(1000, 'x')}));
  EXPECT_FALSE(take().has_value());
  EXPECT_FALSE(has_message(*receiver, *sender));
}

TEST_F(OutboxTest, PartsAreAligned) {
  put({"a", "b", "c"});
  const auto message = take();
  for (const auto& part : message->parts) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(part.data()) % 16, 0);
  }
}

TEST_F(OutboxTest, AFullRingTakesNoMessageUntilOneIsTaken) {
  const std::string text(10000, 'x');
  int count = 0;
  while (put({text})) {
    ++count;
  }
  EXPECT_EQ(count, Outbox::kRingBytes / 10032);
  EXPECT_EQ(texts_of(*take())[0], text);
  EXPECT_TRUE(put({text}));
  EXPECT_FALSE(put({text}));
  for (int i = 0; i < count; ++i) {
    EXPECT_EQ(texts_of(*take())[0], text);
  }
  EXPECT_FALSE(take().has_value());
}

TEST_F(OutboxTest, ALongMessageFindsNoPlace) {
  EXPECT_FALSE(put({std::string(kMaxRingMessage, 'x')}));
  EXPECT_TRUE(put({std::string(kMaxRingMessage - 32, 'x')}));
}

TEST_F(OutboxTest, MessagesOfAllSizesPassFromThreadToThread) {
  constexpr int kCount = 20000;
  const auto text_of = [](std::mt19937& random) {
    return std::string(random() % 3000, static_cast<char>('a' + random() % 26));
  };
  std::thread thread([&] {
    std::mt19937 random(1);
    for (int i = 0; i < kCount; ++i) {
      const std::vector<std::string> texts{text_of(random), text_of(random)};
      while (!put(texts)) {
        std::this_thread::yield();
      }
    }
  });
  std::mt19937 random(1);
  for (int i = 0; i < kCount; ++i) {
    const std::vector<std::string> expected{text_of(random), text_of(random)};
    std::optional<RingMessage> message;
    while (!(message = take())) {
      std::this_thread::yield();
    }
    ASSERT_EQ(texts_of(*message), expected) << i;
  }
  thread.join();
}

// The other process may write anything.
TEST_F(OutboxTest, WhatIsNoMessageIsAnErrorOrAMessageWithinTheRing) {
  std::mt19937_64 random(1);
  int num_errors = 0;
  for (int i = 0; i < 20000; ++i) {
    std::vector<uint64_t> numbers(6);
    for (auto& number : numbers) {
      number = random() >> (random() % 64);
    }
    std::memcpy(sender->ring, numbers.data(), numbers.size() * 8);
    sender->written = random() >> (random() % 64);
    receiver->consumed = 0;
    const std::string error = error_text([&] {
      if (const auto message = take()) {
        for (const auto& part : message->parts) {
          ASSERT_LE(part.size(), kMaxRingMessage);
        }
        texts_of(*message); // which reads them, under a sanitizer
      }
    });
    num_errors += error.empty() ? 0 : 1;
  }
  EXPECT_GT(num_errors, 1000);
}

} // namespace
} // namespace torchkv::dist

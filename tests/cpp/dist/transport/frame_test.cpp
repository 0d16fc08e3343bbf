// The wire format: round trips, truncation, flipped bits, tokens.
#include "dist/transport/frame.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "random_frame.h"

namespace torchkv::dist {
namespace {

constexpr size_t kHeadPreamble = 32;
constexpr size_t kEndOffset = 24;

uint64_t number_at(const std::vector<std::byte>& bytes, size_t at) {
  uint64_t value = 0;
  for (size_t i = 8; i > 0; --i) {
    value = (value << 8U) | static_cast<uint64_t>(bytes[at + i - 1]);
  }
  return value;
}

void set_number(std::vector<std::byte>& bytes, size_t at, uint64_t value) {
  for (size_t i = 0; i < 8; ++i, value >>= 8U) {
    bytes[at + i] = static_cast<std::byte>(value & 255U);
  }
}

Blob head_of(const Encoded& encoded) {
  return to_blob(encoded.head);
}

std::optional<Frame> decoded(
    const Encoded& encoded,
    Direction direction,
    const Limits& limits = kRandomLimits) {
  return decode(
      head_of(encoded), encoded.payloads, direction, random_token(), limits);
}

std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds;
  for (int i = 0; i < kNumKinds; ++i) {
    kinds.push_back(static_cast<Kind>(i));
  }
  return kinds;
}

Message of(RandomFrames& random, Kind kind) {
  Message message = random.message(kind);
  message.header = random.header(direction_of(kind));
  return message;
}

TEST(FrameTest, EveryKindSurvivesARoundTrip) {
  RandomFrames random(1);
  for (const Kind kind : all_kinds()) {
    for (int i = 0; i < 500; ++i) {
      const Message message = of(random, kind);
      ASSERT_TRUE(survives(message)) << name(kind) << ' ' << i;
    }
  }
}

TEST(FrameTest, FramesOfAllKindsSurviveARoundTrip) {
  RandomFrames random(2);
  for (int i = 0; i < 500; ++i) {
    const Direction direction =
        i % 2 == 0 ? Direction::kRequest : Direction::kAnswer;
    const Frame frame = random.frame(direction, 1 + random.below(40));
    const Encoded encoded = encode(frame, direction, random_token());
    const auto again = decoded(encoded, direction);
    ASSERT_TRUE(again && same(*again, frame)) << i;
    // There is one way to encode a frame.
    EXPECT_EQ(encode(*again, direction, random_token()).head, encoded.head);
  }
}

TEST(FrameTest, GotTravelsBothWays) {
  RandomFrames random(3);
  for (const auto direction : {Direction::kRequest, Direction::kAnswer}) {
    Message message = random.message(Kind::kGot);
    message.header = random.header(direction);
    const auto frame =
        decoded(encode({message}, direction, random_token()), direction);
    ASSERT_TRUE(frame);
    EXPECT_TRUE(same(frame->front(), message));
  }
}

TEST(FrameTest, TheHeaderIsThatOfTheFirstMessage) {
  RandomFrames random(4);
  Frame frame = random.frame(Direction::kRequest, 3);
  frame[0].header.floor = 3;
  frame[1].header.floor = frame[2].header.floor = 7;
  const auto again = decoded(
      encode(frame, Direction::kRequest, random_token()), Direction::kRequest);
  ASSERT_TRUE(again);
  for (const Message& message : *again) {
    EXPECT_EQ(message.header.floor, 3);
  }
}

TEST(FrameTest, ShortPayloadsAreInTheHeadAndAligned) {
  RandomFrames random(5);
  Frame frame(3);
  for (size_t i = 0; i < frame.size(); ++i) {
    frame[i].kind = Kind::kValue;
    frame[i].opno = 1;
    frame[i].pieces = 1;
    frame[i].index = 0;
    frame[i].payload =
        random.bytes(std::vector<size_t>{1, kLongPayload - 1, 64}[i]);
  }
  const Encoded encoded = encode(frame, Direction::kAnswer, random_token());
  EXPECT_TRUE(encoded.payloads.empty());
  const Blob head = head_of(encoded);
  const auto again =
      decode(head, {}, Direction::kAnswer, random_token(), kRandomLimits);
  ASSERT_TRUE(again && same(*again, frame));
  for (const Message& message : *again) {
    EXPECT_EQ((message.payload.data() - head.data()) % kInlineAlignment, 0);
    EXPECT_EQ(message.payload.owner(), head.owner());
  }
}

TEST(FrameTest, LongPayloadsAreNotCopied) {
  RandomFrames random(6);
  Frame frame(2);
  for (Message& message : frame) {
    message.kind = Kind::kPush;
    message.slice = {1, 0};
    message.opno = 1;
    message.pieces = 1;
    message.index = 0;
  }
  frame[0].payload = random.bytes(kLongPayload);
  frame[1].payload = random.bytes(100000);
  const Encoded encoded = encode(frame, Direction::kRequest, random_token());
  ASSERT_EQ(encoded.payloads.size(), 2);
  EXPECT_LT(encoded.head.size(), 200);
  const auto again = decoded(encoded, Direction::kRequest);
  ASSERT_TRUE(again && same(*again, frame));
  for (size_t i = 0; i < frame.size(); ++i) {
    EXPECT_EQ(encoded.payloads[i].data(), frame[i].payload.data());
    EXPECT_EQ((*again)[i].payload.data(), frame[i].payload.data());
    EXPECT_EQ((*again)[i].payload.owner(), frame[i].payload.owner());
  }
}

TEST(FrameTest, TheNumberAndSizesOfPayloadsMustFit) {
  RandomFrames random(7);
  Message message = of(random, Kind::kConfig);
  message.payload = random.bytes(5000);
  const Encoded encoded =
      encode({message}, Direction::kRequest, random_token());
  const Blob payload = encoded.payloads.at(0);
  const auto accepts = [&](const std::vector<Blob>& payloads) {
    return decode(
               head_of(encoded),
               payloads,
               Direction::kRequest,
               random_token(),
               kRandomLimits)
        .has_value();
  };
  EXPECT_TRUE(accepts({payload}));
  EXPECT_FALSE(accepts({}));
  EXPECT_FALSE(accepts({payload, payload}));
  EXPECT_FALSE(accepts({payload, Blob()}));
  EXPECT_FALSE(accepts({payload.slice(0, 4999)}));
  EXPECT_FALSE(accepts({random.bytes(5001)}));
}

TEST(FrameTest, NothingMayBeMissing) {
  RandomFrames random(8);
  for (const Kind kind : all_kinds()) {
    for (int i = 0; i < 20; ++i) {
      const Direction direction = direction_of(kind);
      const Encoded encoded =
          encode({of(random, kind)}, direction, random_token());
      for (size_t size = 0; size < encoded.head.size(); ++size) {
        Encoded cut = encoded;
        cut.head.resize(size);
        ASSERT_FALSE(decoded(cut, direction)) << name(kind) << ' ' << size;
        // Also where the frame says that this is all of it.
        if (size >= kHeadPreamble) {
          set_number(cut.head, kEndOffset, size);
          ASSERT_FALSE(decoded(cut, direction)) << name(kind) << ' ' << size;
        }
      }
    }
  }
}

TEST(FrameTest, MessagesMustEndWithinTheHead) {
  RandomFrames random(13);
  for (const Kind kind : all_kinds()) {
    const Direction direction = direction_of(kind);
    Encoded encoded = encode({of(random, kind)}, direction, random_token());
    const uint64_t right = number_at(encoded.head, kEndOffset);
    for (const uint64_t end :
         {uint64_t{0},
          uint64_t{1},
          kHeadPreamble - 1,
          kHeadPreamble,
          right - 1,
          right + 1,
          encoded.head.size() + 1,
          UINT64_MAX}) {
      set_number(encoded.head, kEndOffset, end);
      EXPECT_FALSE(decoded(encoded, direction)) << name(kind) << ' ' << end;
    }
    set_number(encoded.head, kEndOffset, right);
    EXPECT_TRUE(decoded(encoded, direction)) << name(kind);
    // For the sanitizers: what has not even ended is not read on.
    encoded.head.resize(kHeadPreamble + 1);
    set_number(encoded.head, kEndOffset, 0);
    EXPECT_FALSE(decoded(encoded, direction)) << name(kind);
  }
}

TEST(FrameTest, NothingMayFollow) {
  RandomFrames random(9);
  for (const Kind kind : all_kinds()) {
    const Direction direction = direction_of(kind);
    for (const size_t size : {1, 15, 16, 17}) {
      Encoded encoded = encode({of(random, kind)}, direction, random_token());
      encoded.head.resize(encoded.head.size() + size);
      EXPECT_FALSE(decoded(encoded, direction)) << name(kind);
    }
  }
}

TEST(FrameTest, ABitFlippedIsRefusedOrAnotherFrame) {
  RandomFrames random(10);
  for (const Kind kind : all_kinds()) {
    for (int i = 0; i < 5; ++i) {
      const Direction direction = direction_of(kind);
      Encoded encoded = encode({of(random, kind)}, direction, random_token());
      for (size_t bit = 0; bit < 8 * encoded.head.size(); ++bit) {
        const auto mask = static_cast<std::byte>(1U << (bit % 8));
        encoded.head[bit / 8] ^= mask;
        if (const auto frame = decoded(encoded, direction)) {
          EXPECT_GE(bit / 8, kHeadPreamble);
          EXPECT_EQ(
              encode(*frame, direction, random_token()).head, encoded.head);
        }
        encoded.head[bit / 8] ^= mask;
      }
    }
  }
}

TEST(FrameTest, MagicVersionTokenAndDirectionMustBeRight) {
  RandomFrames random(11);
  const Message message = of(random, Kind::kPush);
  const Encoded encoded =
      encode({message}, Direction::kRequest, random_token());
  ASSERT_TRUE(decoded(encoded, Direction::kRequest));
  EXPECT_FALSE(decoded(encoded, Direction::kAnswer));
  for (size_t i = 0; i < kEndOffset; ++i) {
    Encoded other = encoded;
    other.head[i] ^= std::byte{1};
    EXPECT_FALSE(decoded(other, Direction::kRequest)) << i;
    EXPECT_FALSE(decoded(other, Direction::kAnswer)) << i;
  }
  for (size_t i = 0; i < random_token().size(); ++i) {
    Token token = random_token();
    token[i] ^= std::byte{128};
    EXPECT_FALSE(decode(
        head_of(encoded),
        encoded.payloads,
        Direction::kRequest,
        token,
        kRandomLimits))
        << i;
  }
}

TEST(FrameTest, KindsTravelInTheirDirectionOnly) {
  RandomFrames random(12);
  for (const Kind kind : all_kinds()) {
    const Direction wrong =
        is_answer(kind) ? Direction::kRequest : Direction::kAnswer;
    Message message = random.message(kind);
    message.header = random.header(wrong);
    EXPECT_EQ(
        decoded(encode({message}, wrong, random_token()), wrong).has_value(),
        kind == Kind::kGot)
        << name(kind);
  }
}

TEST(FrameTest, AnUnknownKindOrErrorIsRefused) {
  Message message;
  message.kind = static_cast<Kind>(kNumKinds);
  EXPECT_FALSE(survives(message));
  message.kind = Kind::kFatal;
  message.error = Error();
  EXPECT_TRUE(survives(message));
  message.error->code =
      static_cast<ErrorCode>(static_cast<int>(kLastErrorCode) + 1);
  EXPECT_FALSE(survives(message));
}

} // namespace
} // namespace torchkv::dist

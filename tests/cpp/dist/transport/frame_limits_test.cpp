// The wire format: what the fields may be, and how they are written.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "dist/transport/frame.h"
#include "dist/transport/frame_coders.h"
#include "random_frame.h"

namespace torchkv::dist {
namespace {

// A valid message of a kind, which the test then changes.
struct Case {
  const char* what;
  Kind kind;
  std::function<void(Message&)> change;
  bool is_valid;
};

TEST(FrameLimitsTest, FieldsHaveLimits) {
  constexpr int64_t kMost = kMaxCounter - 1;
  const double inf = std::numeric_limits<double>::infinity();
  const SliceId slice{1, 0};
  const std::vector<Case> cases = {
      {"rank", Kind::kBye, [](auto& m) { m.header.rank = 4; }, true},
      {"rank", Kind::kBye, [](auto& m) { m.header.rank = 5; }, false},
      {"rank", Kind::kBye, [](auto& m) { m.header.rank = -1; }, false},
      {"server", Kind::kBye, [](auto& m) { m.header.server = 2; }, true},
      {"server", Kind::kBye, [](auto& m) { m.header.server = 3; }, false},
      {"server", Kind::kBye, [](auto& m) { m.header.server = -1; }, false},
      {"job", Kind::kBye, [](auto& m) { m.header.job = -1; }, false},
      {"inc", Kind::kBye, [](auto& m) { m.header.inc = kMost + 1; }, false},
      {"sinc", Kind::kBye, [](auto& m) { m.header.sinc = INT64_MIN; }, true},
      {"slice", Kind::kPull, [](auto& m) { m.slice.index = 2; }, true},
      {"slice", Kind::kPull, [](auto& m) { m.slice.index = 3; }, false},
      {"slice", Kind::kPull, [](auto& m) { m.slice.index = -1; }, false},
      {"key", Kind::kPull, [](auto& m) { m.slice.key = INT64_MIN; }, true},
      {"key", Kind::kPull, [](auto& m) { m.slice.key = ""; }, true},
      {"key",
       Kind::kPull,
       [](auto& m) { m.slice.key = std::string(kMaxKeyBytes, 'w'); },
       true},
      {"key",
       Kind::kPull,
       [](auto& m) { m.slice.key = std::string(kMaxKeyBytes + 1, 'w'); },
       false},
      {"opno", Kind::kPull, [](auto& m) { m.opno = 0; }, false},
      {"opno", Kind::kPull, [](auto& m) { m.opno = kMost; }, true},
      {"opno", Kind::kPull, [](auto& m) { m.opno = kMost + 1; }, false},
      {"opno", Kind::kDone, [](auto& m) { m.opno = 0; }, false},
      {"prev", Kind::kPull, [](auto& m) { m.prev = 8; }, true},
      {"prev", Kind::kPull, [](auto& m) { m.prev = 9; }, false},
      {"prev", Kind::kPull, [](auto& m) { m.prev = -1; }, false},
      {"acked", Kind::kPull, [](auto& m) { m.acked = 9; }, true},
      {"acked", Kind::kPull, [](auto& m) { m.acked = 10; }, false},
      {"priority", Kind::kPull, [](auto& m) { m.priority = INT64_MIN; }, true},
      {"gen", Kind::kPull, [](auto& m) { m.gen = -1; }, false},
      {"version", Kind::kPull, [](auto& m) { m.min_version = kMost; }, true},
      {"version", Kind::kPull, [](auto& m) { m.min_version = -1; }, false},
      {"have", Kind::kPull, [](auto& m) { m.have = {0, 63}; }, true},
      {"have", Kind::kPull, [](auto& m) { m.have = {64}; }, false},
      {"have", Kind::kPull, [](auto& m) { m.have = {-1}; }, false},
      {"pieces", Kind::kPush, [](auto& m) { m.pieces = 64; }, true},
      {"pieces", Kind::kPush, [](auto& m) { m.pieces = 65; }, false},
      {"pieces", Kind::kPush, [](auto& m) { m.pieces = -1; }, false},
      {"index", Kind::kPush, [](auto& m) { m.index = 0; }, false},
      {"index", Kind::kPush, [](auto& m) { m.pieces = 1, m.index = 0; }, true},
      {"index", Kind::kPush, [](auto& m) { m.index = -2; }, false},
      {"payload",
       Kind::kPush,
       [](auto& m) { m.payload = RandomFrames(1).bytes(1); },
       false},
      {"payload",
       Kind::kPush,
       [](auto& m) {
         m.pieces = 1, m.index = 0, m.payload = RandomFrames(1).bytes(1);
       },
       true},
      {"payload",
       Kind::kPush,
       [](auto& m) {
         m.pieces = 1, m.index = 0, m.payload = RandomFrames(1).bytes(1);
         m.region = Region();
       },
       false},
      {"region",
       Kind::kPush,
       [](auto& m) { m.region = Region{UINT64_MAX, kMost, kMost}; },
       true},
      {"region",
       Kind::kPush,
       [](auto& m) { m.region = Region{0, uint64_t{kMost} + 1, 1}; },
       false},
      {"region",
       Kind::kPush,
       [](auto& m) { m.region = Region{0, 0, UINT64_MAX}; },
       false},
      {"total", Kind::kPush, [](auto& m) { m.total = kMaxElements; }, true},
      {"total",
       Kind::kPush,
       [](auto& m) { m.total = kMaxElements + 1; },
       false},
      {"dtype", Kind::kPush, [](auto& m) { m.dtype = 127; }, true},
      {"dtype", Kind::kPush, [](auto& m) { m.dtype = 128; }, false},
      {"bytes", Kind::kPush, [](auto& m) { m.item_bytes = 16; }, true},
      {"bytes", Kind::kPush, [](auto& m) { m.item_bytes = 17; }, false},
      {"group",
       Kind::kPush,
       [&](auto& m) { m.group = Group{slice, -1, 0}; },
       false},
      {"total",
       Kind::kInit,
       [](auto& m) { m.spec.total = kMaxElements + 1; },
       false},
      {"dtype", Kind::kInit, [](auto& m) { m.spec.dtype = 128; }, false},
      {"bytes", Kind::kInit, [](auto& m) { m.spec.item_bytes = 0; }, false},
      {"bytes", Kind::kInit, [](auto& m) { m.spec.item_bytes = 17; }, false},
      {"sizes",
       Kind::kInit,
       [](auto& m) { m.spec.sizes.assign(kMaxKeyDims, 1); },
       true},
      {"sizes",
       Kind::kInit,
       [](auto& m) { m.spec.sizes.assign(kMaxKeyDims + 1, 1); },
       false},
      {"sizes", Kind::kInit, [](auto& m) { m.spec.sizes = {-1}; }, false},
      {"counts",
       Kind::kMeet,
       [](auto& m) { m.counts = {{{1, 0}, 5}, {{1, 1}, 5}, {{"a", 0}, 0}}; },
       true},
      {"counts",
       Kind::kMeet,
       [](auto& m) { m.counts = {{{1, 0}, 5}, {{1, 0}, 5}}; },
       false},
      {"counts",
       Kind::kMeet,
       [](auto& m) { m.counts = {{{1, 1}, 5}, {{1, 0}, 5}}; },
       false},
      {"counts",
       Kind::kMeet,
       [](auto& m) { m.counts = {{{1, -1}, 5}}; },
       false},
      {"factor", Kind::kFactor, [](auto& m) { m.factor = -0.0; }, true},
      {"factor", Kind::kFactor, [&](auto& m) { m.factor = inf; }, false},
      {"factor", Kind::kFactor, [&](auto& m) { m.factor = inf - inf; }, false},
      {"partial", Kind::kDone, [](auto& m) { m.partial = -0.0; }, true},
      {"partial", Kind::kDone, [&](auto& m) { m.partial = inf - inf; }, true},
      {"age", Kind::kDone, [](auto& m) { m.age = -5; }, true},
      {"missing", Kind::kWait, [](auto& m) { m.missing = {4}; }, true},
      {"missing", Kind::kWait, [](auto& m) { m.missing = {5}; }, false},
      {"error", Kind::kFatal, [](auto& m) { m.error.reset(); }, false},
      {"error", Kind::kReject, [](auto& m) { m.error.reset(); }, false},
      {"error", Kind::kError, [](auto& m) { m.error.reset(); }, false},
      {"error", Kind::kAlive, [](auto& m) { m.error.reset(); }, true},
      {"who", Kind::kError, [](auto& m) { m.error->who = -1; }, true},
      {"who", Kind::kError, [](auto& m) { m.error->who = 5; }, false},
      {"got", Kind::kGot, [](auto& m) { m.got = {{0, 0}}; }, false},
      {"got", Kind::kGot, [](auto& m) { m.got = {{1, 64}}; }, false},
      {"opnos", Kind::kFree, [](auto& m) { m.opnos = {0}; }, false},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    Message message;
    message.kind = cases[i].kind;
    message.opno = is_operation(message.kind) || message.kind == Kind::kDone ||
            message.kind == Kind::kWait || message.kind == Kind::kError
        ? 9
        : 0;
    if (is_operation(message.kind) && message.kind != Kind::kMeet) {
      message.slice = slice;
    }
    if (message.kind == Kind::kFatal || message.kind == Kind::kReject ||
        message.kind == Kind::kError) {
      message.error = Error();
    }
    ASSERT_TRUE(survives(message)) << i << ' ' << cases[i].what;
    cases[i].change(message);
    EXPECT_EQ(survives(message), cases[i].is_valid)
        << i << ' ' << cases[i].what;
  }
}

TEST(FrameLimitsTest, AValueIsAPieceOrALease) {
  Message message;
  message.kind = Kind::kValue;
  message.opno = 1;
  EXPECT_FALSE(survives(message));
  message.region = Region();
  EXPECT_TRUE(survives(message));
  message.region.reset();
  message.pieces = 1;
  EXPECT_FALSE(survives(message));
  message.index = 0; // of no bytes
  EXPECT_TRUE(survives(message));
}

TEST(FrameLimitsTest, TextsOfErrorsAreCut) {
  Message message;
  message.kind = Kind::kFatal;
  message.error = Error();
  message.error->text = std::string(kMaxTextBytes + 5, 'x');
  const auto frame = round_trip(message);
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->front().error->text, std::string(kMaxTextBytes, 'x'));
}

// A frame of one message, or of as many as it says, from raw fields.
class RawFrame {
 public:
  explicit RawFrame(
      uint64_t num_messages = 1,
      Direction direction = Direction::kRequest)
      : direction_(direction), writer_(64) {
    Message got;
    got.kind = Kind::kGot;
    std::vector<std::byte> head = encode({got}, direction, random_token()).head;
    head.resize(head.size() - 3); // the number of messages, and the only one
    writer_.raw(head.data(), head.size());
    writer_.integer(num_messages);
  }
  FrameWriter& operator*() {
    return writer_;
  }
  FrameWriter* operator->() {
    return &writer_;
  }
  RawFrame& byte(unsigned value) {
    const auto byte = static_cast<std::byte>(value);
    writer_.raw(&byte, 1);
    return *this;
  }
  RawFrame& kind(Kind kind) {
    writer_.integer(static_cast<uint64_t>(kind));
    return *this;
  }
  // `tail`: what follows the messages.
  std::optional<Frame> decoded(const std::vector<std::byte>& tail = {}) {
    const size_t end = writer_.size();
    writer_.resize(kEndOffset);
    writer_.fixed(end);
    writer_.resize(end);
    writer_.raw(tail.data(), tail.size());
    return decode(
        to_blob(writer_.take()), {}, direction_, random_token(), kRandomLimits);
  }

 private:
  static constexpr size_t kEndOffset = 24;
  const Direction direction_;
  FrameWriter writer_;
};

TEST(FrameLimitsTest, TheNumberOfMessagesMustBeRight) {
  for (const uint64_t said : {0, 1, 2, 3}) {
    for (const uint64_t sent : {0, 1, 2, 3}) {
      RawFrame raw(said);
      for (uint64_t i = 0; i < sent; ++i) {
        raw.kind(Kind::kBye);
      }
      EXPECT_EQ(raw.decoded().has_value(), said == sent && said > 0);
    }
  }
  RawFrame most(kMaxMessages);
  RawFrame too_many(kMaxMessages + 1);
  for (size_t i = 0; i < kMaxMessages; ++i) {
    most.kind(Kind::kBye);
    too_many.kind(Kind::kBye);
  }
  too_many.kind(Kind::kBye);
  EXPECT_TRUE(most.decoded());
  EXPECT_FALSE(too_many.decoded());
}

TEST(FrameLimitsTest, IntegersHaveOneForm) {
  const auto accepts = [](const std::vector<unsigned>& list_of_opnos) {
    RawFrame raw;
    raw.kind(Kind::kFree).byte(1);
    for (const unsigned byte : list_of_opnos) {
      raw.byte(byte);
    }
    return raw.decoded().has_value();
  };
  EXPECT_TRUE(accepts({1}));
  EXPECT_TRUE(accepts({0x81, 1}));
  EXPECT_FALSE(accepts({0x81, 0})); // a zero in front
  EXPECT_FALSE(accepts({0x81}));
  EXPECT_FALSE(accepts({}));
  std::vector<unsigned> digits(8, 0xFF);
  digits.push_back(0x3F);
  EXPECT_TRUE(accepts(digits)); // kMaxCounter - 1
  digits.back() = 0x40;
  EXPECT_FALSE(accepts(digits));
  // Signed integers of 64 bits, and more.
  const auto accepts_priority = [](const std::vector<unsigned>& bytes) {
    RawFrame raw;
    raw.kind(Kind::kEnter).byte(5).byte(1).byte(1);
    for (const unsigned byte : bytes) {
      raw.byte(byte);
    }
    raw.byte(0).byte(0).byte(0);
    return raw.decoded().has_value();
  };
  digits.assign(9, 0xFF);
  digits.push_back(1);
  EXPECT_TRUE(accepts_priority({0}));
  EXPECT_TRUE(accepts_priority(digits)); // INT64_MIN
  digits.back() = 2;
  EXPECT_FALSE(accepts_priority(digits));
  digits.back() = 3;
  EXPECT_FALSE(accepts_priority(digits));
  digits.back() = 0x81;
  digits.push_back(0);
  EXPECT_FALSE(accepts_priority(digits));
}

TEST(FrameLimitsTest, BooleansAreZeroOrOne) {
  for (const unsigned value : {0, 1, 2, 255}) {
    RawFrame raw;
    raw.kind(Kind::kHeartbeat).byte(value);
    if (value == 1) {
      raw.byte(0).byte(0).byte(0).byte(0).byte(0); // an error
    }
    EXPECT_EQ(raw.decoded().has_value(), value <= 1) << value;
  }
}

TEST(FrameLimitsTest, APartialNormOfZeroIsLeftOut) {
  const auto decoded = [](unsigned is_set, uint64_t bits) {
    RawFrame raw(1, Direction::kAnswer);
    raw.kind(Kind::kDone).byte(1).byte(0).byte(0).byte(0).byte(0).byte(0);
    raw.byte(0).byte(is_set);
    if (is_set != 0) {
      raw->fixed(bits);
    }
    return raw.decoded();
  };
  EXPECT_TRUE(decoded(0, 0));
  EXPECT_TRUE(decoded(1, 1));
  EXPECT_TRUE(decoded(1, uint64_t{1} << 63U)); // -0.0
  EXPECT_FALSE(decoded(1, 0));
}

TEST(FrameLimitsTest, LongTextsAreRefused) {
  for (const size_t size : {kMaxTextBytes, kMaxTextBytes + 1}) {
    RawFrame raw;
    // An error without a slice, its text, no ranks.
    raw.kind(Kind::kHeartbeat).byte(1).byte(0).byte(0).byte(0);
    const std::string text(size, 'x');
    raw->integer(size);
    raw->raw(text.data(), text.size());
    raw.byte(0);
    EXPECT_EQ(raw.decoded().has_value(), size == kMaxTextBytes);
  }
}

TEST(FrameLimitsTest, ClaimsNeedBytes) {
  const auto kinds = {Kind::kFree, Kind::kGot};
  for (const Kind kind : kinds) {
    for (unsigned shift = 1; shift < 64; ++shift) {
      RawFrame raw;
      raw.kind(kind);
      raw->integer(uint64_t{1} << shift);
      EXPECT_FALSE(raw.byte(1).decoded());
    }
  }
  for (unsigned shift = 1; shift < 64; ++shift) {
    RawFrame raw; // a DELETE with a long key
    raw.kind(Kind::kDelete);
    raw->integer(uint64_t{1} << shift);
    EXPECT_FALSE(raw.byte('w').decoded());
    RawFrame other; // a CONFIG with a payload
    other.kind(Kind::kConfig).byte(1).byte(1).byte(1).byte(0).byte(0).byte(0);
    other->integer(uint64_t{1} << shift);
    EXPECT_FALSE(other.byte(0).decoded());
    RawFrame messages(uint64_t{1} << shift);
    EXPECT_FALSE(messages.kind(Kind::kBye).decoded());
  }
}

TEST(FrameLimitsTest, PaddingIsZero) {
  const auto decoded = [](std::byte padding) {
    RawFrame raw; // a CONFIG with one byte
    raw.kind(Kind::kConfig).byte(1).byte(1).byte(1).byte(0).byte(0).byte(0);
    raw->integer(1);
    raw->integer(0);
    std::vector<std::byte> tail(
        align_inline(raw->size()) - raw->size(), padding);
    EXPECT_FALSE(tail.empty());
    tail.push_back(std::byte{42});
    return raw.decoded(tail);
  };
  const auto frame = decoded(std::byte{0});
  ASSERT_TRUE(frame);
  EXPECT_EQ(*frame->front().payload.data(), std::byte{42});
  EXPECT_FALSE(decoded(std::byte{1}));
}

TEST(FrameLimitsTest, ASmallPushNeedsFewBytes) {
  RandomFrames random(1);
  const auto frame_of = [&](int num_keys) {
    Frame frame;
    for (int i = 0; i < num_keys; ++i) {
      Message& message = frame.emplace_back();
      message.kind = Kind::kPush;
      message.slice = {Key("layer4.2.bn3.weight." + std::to_string(i)), 0};
      message.opno = 1000000 + i;
      message.prev = 999000 + i;
      message.acked = 999900 + i;
      message.pieces = 1;
      message.index = 0;
      message.priority = -i;
      message.gen = 1000;
      message.snap = 100;
      message.total = 16;
      message.round = 1000000;
      message.base = 999999;
      message.payload = random.bytes(64);
      message.header.job = 12345;
      message.header.floor = 999900;
    }
    return encode(frame, Direction::kRequest, random_token()).head.size();
  };
  EXPECT_LT(frame_of(1) - 64, 150);
  EXPECT_LT((frame_of(161) - frame_of(1)) / 160 - 64, 80);
}

} // namespace
} // namespace torchkv::dist

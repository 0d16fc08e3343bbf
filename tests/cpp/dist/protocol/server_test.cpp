// Server: operations once and in order, rounds, answers.
#include "dist/protocol/server.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server_script.h"

namespace torchkv::dist {
namespace {

using Values = ServerScript::Values;
using Opnos = std::vector<int64_t>;
using Ranks = std::vector<int32_t>;

Ranks ranks_of(const RoundPtr& round) {
  Ranks ranks;
  for (const auto& push : round->pushes) {
    ranks.push_back(push.rank);
  }
  return ranks;
}

TEST(ServerTest, ARoundHasThePushesInRankOrder) {
  ServerScript s(ServerScript::config(kSync));
  Opnos pushes(3);
  for (const int32_t rank : {2, 0, 1}) {
    EXPECT_TRUE(s.begun().empty());
    pushes[static_cast<size_t>(rank)] = s.push(rank, 1);
  }
  ASSERT_EQ(s.begun().size(), 1);
  const auto round = s.begun()[0];
  EXPECT_EQ(ranks_of(round), (Ranks{0, 1, 2}));
  EXPECT_EQ(round->version, 1);
  EXPECT_EQ(round->num_elements, 4);
  EXPECT_EQ(round->spec->total, 4);
  EXPECT_EQ(round->source.use_count(), 1); // it may be written in place
  for (int32_t rank = 0; rank < 3; ++rank) {
    EXPECT_FALSE(s.has(rank, Kind::kDone, pushes[static_cast<size_t>(rank)]));
  }
  s.apply(round);
  for (int32_t rank = 0; rank < 3; ++rank) {
    const Message done = s.last(rank, Kind::kDone);
    EXPECT_EQ(done.opno, pushes[static_cast<size_t>(rank)]);
    EXPECT_EQ(done.version, 1);
    EXPECT_EQ(done.age, 0);
  }
  EXPECT_EQ(s.stored(), (Values{3, 3, 3, 3}));
}

TEST(ServerTest, SecondPushesWaitForTheNextRound) {
  ServerScript s(ServerScript::config(kSync, 2));
  s.push(0, 1);
  s.push(0, 2);
  s.push(1, 1);
  EXPECT_EQ(s.begun().size(), 1);
  s.push(1, 2); // the slice is busy
  EXPECT_EQ(s.begun().size(), 1);
  s.apply_all();
  EXPECT_EQ(s.begun().size(), 2);
  EXPECT_EQ(s.view()->version, 2);
  EXPECT_EQ(s.stored(), (Values{4, 4, 4, 4}));
}

TEST(ServerTest, AsyncUpdatesByOnePush) {
  ServerScript s(ServerScript::config(1));
  s.push(2, 1);
  s.push(1, 1);
  s.push(2, 2);
  s.apply_all();
  ASSERT_EQ(s.begun().size(), 3);
  EXPECT_EQ(ranks_of(s.begun()[0]), Ranks{2});
  EXPECT_EQ(ranks_of(s.begun()[1]), Ranks{1});
  EXPECT_EQ(ranks_of(s.begun()[2]), Ranks{2});
  EXPECT_EQ(s.last(2, Kind::kDone).age, 2); // base 0, version before it 2
}

TEST(ServerTest, RepeatedAndLateMessagesCountOnce) {
  ServerScript s(ServerScript::config(1));
  Message push = s.operation(1, Kind::kPush, ServerScript::slice());
  push.round = 1;
  const auto parts = ServerScript::parts(push, {1, 2, 3, 4});
  s.send(parts[1]);
  s.send(parts[1]);
  EXPECT_TRUE(s.begun().empty());
  s.send(parts[0]);
  s.send(parts[0]); // it waits for this server itself
  ASSERT_EQ(s.begun().size(), 1);
  EXPECT_EQ(
      ServerScript::join(s.begun()[0]->pushes[0].pieces), (Values{1, 2, 3, 4}));
  EXPECT_TRUE(s.last(1, Kind::kWait).missing.empty());
  s.apply_all();
  s.send(parts[0]); // is answered again
  EXPECT_EQ(
      std::count_if(
          s.out.begin(),
          s.out.end(),
          [](const auto& action) {
            return std::holds_alternative<Apply>(action);
          }),
      1);
  const auto done = s.answers(1, Kind::kDone);
  EXPECT_EQ(std::count(done.begin(), done.end(), push.opno), 2);
  Message beat = s.request(1, Kind::kHeartbeat);
  beat.header.floor = push.opno + 1;
  s.send(beat);
  const size_t before = s.out.size();
  s.send(parts[0]); // below the floor: long answered
  EXPECT_EQ(s.out.size(), before);
  EXPECT_EQ(s.stored(), (Values{1, 2, 3, 4}));
}

TEST(ServerTest, OperationsThatOvertakeAreHeld) {
  ServerScript s(ServerScript::config(1));
  Message first = s.operation(1, Kind::kPush, ServerScript::slice());
  first.round = 1;
  Message second = s.operation(1, Kind::kPush, ServerScript::slice());
  second.round = 2;
  Message third = s.operation(1, Kind::kPull, ServerScript::slice());
  s.send(third);
  s.send_parts(second, {10, 10, 10, 10});
  EXPECT_TRUE(s.begun().empty());
  s.send(third);
  EXPECT_EQ(s.last(1, Kind::kWait).opno, third.opno);
  s.send_parts(first, {1, 1, 1, 1});
  s.apply_all();
  EXPECT_EQ(s.begun().size(), 2);
  EXPECT_EQ(s.value(1, third.opno), (Values{11, 11, 11, 11}));
}

TEST(ServerTest, OneGotAndOneFrameOfAnswersPerEvent) {
  ServerScript s(ServerScript::config(1));
  Frame frame;
  for (int64_t i = 0; i < 3; ++i) {
    Message pull = s.operation(1, Kind::kPull, ServerScript::slice());
    pull.min_version = 1; // not answered yet
    frame.push_back(pull);
  }
  Message push = s.operation(1, Kind::kPush, ServerScript::slice());
  push.round = 1;
  for (const auto& part : ServerScript::parts(push, {1, 1, 1, 1})) {
    frame.push_back(part);
  }
  frame.push_back(frame[0]); // asks: WAIT
  s.out.clear();
  s.server.on_message(frame, s.now);
  s.collect();
  const auto sent = s.all<Send>();
  ASSERT_EQ(sent.size(), 1);
  ASSERT_EQ(sent[0]->frame.size(), 2);
  EXPECT_EQ(sent[0]->frame[0].kind, Kind::kWait);
  EXPECT_EQ(sent[0]->frame[1].kind, Kind::kGot);
  EXPECT_EQ(
      sent[0]->frame[1].got,
      (std::vector<std::pair<int64_t, int32_t>>{
          {push.opno, 0}, {push.opno, 1}}));
}

TEST(ServerTest, AnAnswerToAPullIsOneVersion) {
  ServerScript s(ServerScript::config(1));
  Message pull = s.operation(1, Kind::kPull, ServerScript::slice());
  s.send(pull);
  const auto first = s.messages(1, Kind::kValue);
  ASSERT_EQ(first.size(), 2);
  EXPECT_EQ(first[0].pieces, 2);
  EXPECT_EQ(first[0].version, 0);
  EXPECT_EQ(first[0].kid, 1);
  s.push(0, 1);
  s.apply_all();
  EXPECT_EQ(s.stored(), (Values{1, 1, 1, 1}));
  s.wait(s.server.peer_state(1) == PeerState::kUp ? 1 : 0);
  s.out.clear();
  pull.have = {0, -5, 99};
  s.send(pull);
  const auto again = s.messages(1, Kind::kValue);
  ASSERT_EQ(again.size(), 1);
  EXPECT_EQ(again[0].index, 1);
  EXPECT_EQ(again[0].version, 0);
  EXPECT_EQ(ServerScript::join({again[0].payload}), (Values{0, 0}));
}

TEST(ServerTest, APullSeesOwnPushesAndTheVersionItAsksFor) {
  ServerScript s(ServerScript::config(1));
  s.push(1, 1);
  const int64_t own = s.pull(1);
  const int64_t late = s.pull(2, 2);
  EXPECT_TRUE(s.messages(1, Kind::kValue).empty());
  s.apply_all();
  EXPECT_EQ(s.value(1, own), (Values{1, 1, 1, 1}));
  EXPECT_TRUE(s.messages(2, Kind::kValue).empty());
  s.push(1, 2);
  s.apply_all();
  EXPECT_EQ(s.value(2, late), (Values{2, 2, 2, 2}));
}

TEST(ServerTest, ASyncPullSeesExactlyItsRound) {
  ServerScript s(ServerScript::config(kSync, 2));
  const int64_t pushed = s.push(0, 1, {}, 1, Kind::kPushPull);
  s.push(0, 2);
  s.push(1, 1);
  s.push(1, 2);
  const int64_t second = s.pull(1);
  s.apply_all();
  EXPECT_EQ(s.value(0, pushed), (Values{2, 2, 2, 2}));
  EXPECT_EQ(s.value(1, second), (Values{4, 4, 4, 4}));
  EXPECT_FALSE(s.has(0, Kind::kDone, pushed));
}

TEST(ServerTest, ValuesOfOthersLeaveAtOnce) {
  ServerScript s(ServerScript::config(1));
  s.push(0, 1);
  const int64_t pull = s.pull(1, 1);
  EXPECT_TRUE(s.messages(1, Kind::kValue).empty());
  s.apply_all();
  EXPECT_EQ(s.messages(1, Kind::kValue).size(), 2);
  EXPECT_EQ(s.messages(1, Kind::kValue).size(), 2);
  EXPECT_EQ(s.value(1, pull), (Values{1, 1, 1, 1}));
}

TEST(ServerTest, AnUpdaterThatThrowsCounts) {
  ServerScript s(ServerScript::config(kSync, 2));
  const int64_t pushed = s.push(0, 1);
  const int64_t both = s.push(1, 1, {}, 1, Kind::kPushPull);
  s.apply(s.begun()[0], "ValueError: no");
  for (const auto& [rank, opno] : {std::pair{0, pushed}, {1, both}}) {
    const Message answer = s.last(rank, Kind::kError);
    EXPECT_EQ(answer.opno, opno);
    EXPECT_EQ(answer.error->code, ErrorCode::kUpdater);
    EXPECT_EQ(answer.error->who, -1);
    EXPECT_EQ(answer.error->slice, ServerScript::slice());
    EXPECT_EQ(answer.error->text, "ValueError: no");
  }
  const int64_t pull = s.pull(1);
  EXPECT_EQ(s.value(1, pull), (Values{2, 2, 2, 2})); // what it left
  EXPECT_EQ(s.last(1, Kind::kValue).version, 1);
  EXPECT_TRUE(s.messages(1, Kind::kFatal).empty());
  EXPECT_TRUE(s.value(1, both).empty());
}

TEST(ServerTest, AQuorumWaitsForGraceAndPatience) {
  Config config = ServerScript::config(2);
  config.policy.grace = 0.3;
  config.policy.patience = 1;
  ServerScript s(config);
  s.push(1, 1);
  ASSERT_EQ(s.all<Wake>().size(), 1);
  EXPECT_EQ(s.all<Wake>()[0]->at, 1);
  s.now = 0.5;
  s.push(2, 1);
  ASSERT_EQ(s.all<Wake>().size(), 2);
  EXPECT_EQ(s.all<Wake>()[1]->at, 0.8);
  s.wait(0.25);
  EXPECT_TRUE(s.begun().empty());
  s.wait(0.05);
  ASSERT_EQ(s.begun().size(), 1);
  EXPECT_EQ(ranks_of(s.begun()[0]), (Ranks{1, 2}));
  s.apply_all();
  s.push(0, 1); // alone: until it is out of patience
  s.wait(0.9);
  EXPECT_EQ(s.begun().size(), 1);
  s.wait(0.2);
  ASSERT_EQ(s.begun().size(), 2);
  s.apply_all();
  for (const int32_t rank : {0, 1, 2}) {
    s.push(rank, 2); // all: at once
  }
  EXPECT_EQ(s.begun().size(), 3);
}

TEST(ServerTest, TheStalenessBoundHoldsPushesAndPulls) {
  Config config = ServerScript::config(1, 2);
  config.policy.staleness = 1;
  ServerScript s(config);
  for (int64_t round = 1; round <= 3; ++round) {
    s.push(0, round);
    s.apply_all();
  }
  EXPECT_EQ(s.view()->version, 2); // the third would be two ahead
  const int64_t pull = s.pull(0);
  s.push(1, 1);
  s.apply_all();
  EXPECT_EQ(s.view()->version, 4);
  EXPECT_TRUE(s.value(0, pull).empty()); // needs 3, and 1 is too far behind
  s.push(1, 2);
  s.apply_all();
  EXPECT_EQ(s.value(0, pull), (Values{5, 5, 5, 5}));
}

TEST(ServerTest, TheLastOneDeletesAndTheNextInitIsAnotherIncarnation) {
  ServerScript s(ServerScript::config(1, 2));
  s.push(0, 1);
  s.apply_all();
  s.control(0, Kind::kDelete);
  const int64_t again = s.init(0, 1, {5, 5, 5, 5});
  EXPECT_FALSE(s.has(0, Kind::kDone, again));
  EXPECT_TRUE(s.all<Erase>().empty());
  s.control(1, Kind::kDelete);
  ASSERT_EQ(s.all<Erase>().size(), 1);
  EXPECT_EQ(s.all<Erase>()[0]->kid, 1);
  EXPECT_TRUE(s.has(0, Kind::kDone, again));
  EXPECT_EQ(s.last(0, Kind::kDone).kid, 2);
  EXPECT_EQ(s.view()->version, 0);
  EXPECT_EQ(s.stored(), (Values{5, 5, 5, 5}));
}

TEST(ServerTest, AnInitWaitsForTheDeleteOfItsRank) {
  ServerScript s(ServerScript::config(std::nullopt, 2));
  s.push(0, 1);
  s.control(0, Kind::kDelete); // until the other rank has pushed
  const int64_t again = s.init(0, 1, {5, 5, 5, 5});
  EXPECT_FALSE(s.has(0, Kind::kDone, again));
  s.push(1, 1);
  s.apply_all();
  EXPECT_FALSE(s.has(0, Kind::kDone, again));
  s.control(1, Kind::kDelete);
  EXPECT_TRUE(s.has(0, Kind::kDone, again));
  EXPECT_EQ(s.last(0, Kind::kDone).kid, 2);
  EXPECT_EQ(s.stored(), (Values{5, 5, 5, 5}));
}

TEST(ServerTest, AnInitWaitsForADyingSlice) {
  ServerScript s(ServerScript::config(1));
  s.control(0, Kind::kDelete);
  s.control(1, Kind::kDelete);
  s.push(2, 1);
  const auto round = s.begun()[0];
  s.lose(2); // while its push is applied
  s.hello(2, 2);
  const int64_t heir = s.init(2, 2);
  const int64_t again = s.init(0, 1, {5, 5, 5, 5});
  EXPECT_FALSE(s.has(0, Kind::kDone, again));
  const auto answers = s.answers(2, Kind::kDone).size();
  EXPECT_TRUE(s.view()->busy);
  s.apply(round);
  EXPECT_EQ(s.view()->kid, 2);
  EXPECT_EQ(s.stored(), (Values{5, 5, 5, 5}));
  EXPECT_TRUE(s.has(0, Kind::kDone, again));
  EXPECT_EQ(s.answers(2, Kind::kDone).size(), answers + 1);
  EXPECT_EQ(s.last(2, Kind::kDone).opno, heir);
  EXPECT_EQ(s.last(2, Kind::kDone).kid, 2);
}

TEST(ServerTest, AnOldRoundIsNotTheHeirs) {
  ServerScript s(ServerScript::config(1));
  s.push(2, 1);
  s.push(0, 1);
  s.push(0, 2);
  s.lose(2);
  s.hello(2, 2);
  s.init(2, 2);
  EXPECT_EQ(s.last(2, Kind::kDone).round, 0); // as far as the slowest
  const int64_t same = s.push(2, 1, {}, 2); // the old push's number
  s.apply(s.begun()[0]);
  EXPECT_EQ(s.view()->clock[2], (std::pair<int32_t, int64_t>{2, 0}));
  EXPECT_EQ(s.stored(), (Values{1, 1, 1, 1}));
  EXPECT_FALSE(s.has(2, Kind::kDone, same));
}

TEST(ServerTest, StepsInTwoPhases) {
  ServerScript s(ServerScript::config(kSync, 2));
  const Group group{ServerScript::slice(), 1, 1};
  const auto grouped = [&](Message& message) { message.group = group; };
  s.push(0, 1, grouped);
  const int64_t norm =
      s.control(0, Kind::kNorm, [](Message& m) { m.round = 1; });
  s.push(1, 1, grouped);
  ASSERT_EQ(s.all<Measure>().size(), 1);
  EXPECT_TRUE(s.begun().empty());
  const auto round = s.all<Measure>()[0]->round;
  EXPECT_FALSE(s.has(0, Kind::kDone, norm));
  round->partial = 2.5;
  s.server.on_measured(round, s.now);
  s.collect();
  ASSERT_TRUE(s.has(0, Kind::kDone, norm));
  EXPECT_EQ(s.last(0, Kind::kDone).partial, 2.5);
  s.server.on_applied(round, std::nullopt, s.now); // too early: ignored
  EXPECT_EQ(s.view()->version, 0);
  s.control(0, Kind::kFactor, [](Message& m) {
    m.round = 1;
    m.factor = 0.5;
  });
  ASSERT_EQ(s.begun().size(), 1);
  EXPECT_EQ(s.begun()[0], round);
  EXPECT_EQ(round->factor, 0.5);
  s.apply_all();
  EXPECT_EQ(s.view()->version, 1);
  // A factor that nobody waits for.
  s.control(0, Kind::kFactor, [](Message& m) { m.round = 1; });
  EXPECT_EQ(s.last(1, Kind::kFatal).error->code, ErrorCode::kUnknown);
}

TEST(ServerTest, AFactorIsAppliedOnce) {
  ServerScript s(ServerScript::config(kSync, 1));
  const Group group{ServerScript::slice(), 1, 1};
  s.push(0, 1, [&](Message& message) { message.group = group; });
  s.server.on_measured(s.all<Measure>()[0]->round, s.now);
  for (int i = 0; i < 2; ++i) {
    s.control(0, Kind::kFactor, [](Message& m) { m.round = 1; });
  }
  EXPECT_EQ(s.begun().size(), 1);
}

TEST(ServerTest, DifferentGroupsInOneRoundAreFatal) {
  ServerScript s(ServerScript::config(kSync, 2));
  s.push(
      0, 1, [](Message& m) { m.group = Group{ServerScript::slice(), 1, 1}; });
  s.push(1, 1);
  EXPECT_EQ(s.last(0, Kind::kFatal).error->code, ErrorCode::kGroup);
  EXPECT_EQ(s.last(0, Kind::kFatal).error->who, 1);
}

TEST(ServerTest, RegionsAreNamedInTheRound) {
  Config config = ServerScript::config(1);
  config.push_regions = true;
  ServerScript s(config);
  Message push = s.operation(1, Kind::kPush, ServerScript::slice());
  push.round = 1;
  push.pieces = 1;
  push.index = 0;
  push.region = Region{3, 64, 32};
  s.send(push);
  ASSERT_EQ(s.begun().size(), 1);
  EXPECT_EQ(s.begun()[0]->pushes[0].region, push.region);
  EXPECT_TRUE(s.begun()[0]->pushes[0].pieces.empty());
  Message wrong = s.operation(2, Kind::kPush, ServerScript::slice());
  wrong.round = 1;
  wrong.pieces = 1;
  wrong.index = 0;
  wrong.region = Region{3, 64, 24};
  s.send(wrong);
  EXPECT_EQ(s.last(2, Kind::kError).error->code, ErrorCode::kShape);
}

TEST(ServerTest, CodesMayHaveAnySizeUpToALimit) {
  const Config config = ServerScript::config(1);
  ServerScript s(config);
  const auto push = [&](int64_t round, size_t num_bytes) {
    const auto bytes = std::make_shared<const std::string>(num_bytes, 'x');
    Message message = s.operation(1, Kind::kPush, ServerScript::slice());
    message.round = round;
    message.is_encoded = true;
    const size_t size = config.piece_bytes;
    message.pieces = static_cast<int32_t>((num_bytes + size - 1) / size);
    for (int32_t i = 0; i < message.pieces; ++i) {
      message.index = i;
      const size_t begin = static_cast<size_t>(i) * size;
      message.payload = Blob(bytes, bytes->data(), num_bytes)
                            .slice(begin, std::min(size, num_bytes - begin));
      s.send(message);
    }
  };
  push(1, 5);
  ASSERT_EQ(s.begun().size(), 1);
  EXPECT_TRUE(s.begun()[0]->pushes[0].is_encoded);
  const auto most = static_cast<size_t>(max_encoded_bytes(*s.begun()[0]->spec));
  push(2, most);
  EXPECT_TRUE(s.messages(1, Kind::kError).empty());
  push(3, most + 1);
  EXPECT_EQ(s.last(1, Kind::kError).error->code, ErrorCode::kShape);
}

TEST(ServerTest, PushesMayHaveAnotherTypeThanTheKey) {
  ServerScript s(ServerScript::config(1));
  Message push = s.operation(1, Kind::kPush, ServerScript::slice());
  push.round = 1;
  push.item_bytes = 2;
  push.dtype = 5;
  push.pieces = 1;
  push.index = 0;
  push.payload = ServerScript::blob({1});
  s.send(push);
  ASSERT_EQ(s.begun().size(), 1);
  EXPECT_EQ(s.begun()[0]->pushes[0].dtype, 5);
  EXPECT_EQ(s.begun()[0]->pushes[0].item_bytes, 2);
}

} // namespace
} // namespace torchkv::dist

// Server: sessions, losses, barriers, options, close.
#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "dist/protocol/server.h"
#include "server_script.h"

namespace torchkv::dist {
namespace {

using Values = ServerScript::Values;
using Ranks = std::vector<int32_t>;

ServerScript::Edit with_counts(int64_t count) {
  return [=](Message& message) { message.counts = pushes_of_k(count); };
}

TEST(ServerSessionTest, HelloIsAnsweredByWhatTheServerKnows) {
  ServerScript s(ServerScript::config(1));
  const Message welcome = s.last(1, Kind::kWelcome);
  EXPECT_EQ(welcome.header.sinc, ServerScript::kSinc);
  EXPECT_EQ(welcome.header.inc, 1);
  EXPECT_EQ(welcome.gen, 0);
  Message other = s.request(1, Kind::kHello);
  other.header.digest = 1;
  s.send(other);
  EXPECT_EQ(s.last(1, Kind::kReject).error->code, ErrorCode::kConfig);
  EXPECT_EQ(s.last(1, Kind::kReject).error->who, 1);
}

TEST(ServerSessionTest, OldIncarnationsAreExpired) {
  ServerScript s(ServerScript::config(1));
  s.hello(1, 3);
  EXPECT_EQ(s.last(1, Kind::kWelcome).header.inc, 3);
  s.push(1, 1);
  EXPECT_EQ(s.last(1, Kind::kExpired).header.inc, 1);
  EXPECT_EQ(s.last(1, Kind::kExpired).by, 3);
  s.hello(1, 2);
  EXPECT_EQ(s.last(1, Kind::kExpired).by, 3);
  EXPECT_TRUE(s.begun().empty());
  // Another process answers in the place of the server that it knew.
  Message beat = s.request(2, Kind::kHeartbeat);
  beat.header.sinc = 6;
  s.send(beat);
  EXPECT_EQ(s.last(2, Kind::kExpired).by, 1);
}

TEST(ServerSessionTest, WhoIsReplacedUnseenLeavesTheClocks) {
  ServerScript s(ServerScript::config(1), nullptr, false);
  s.hello(0);
  s.init(0);
  EXPECT_EQ(s.view()->clock.size(), 3);
  s.hello(2, 2);
  EXPECT_EQ(
      s.view()->clock,
      (std::vector<std::pair<int32_t, int64_t>>{{0, 0}, {1, 0}}));
}

TEST(ServerSessionTest, SilenceIsLossUnlessTheServerItselfWasStopped) {
  ServerScript s(ServerScript::config(1));
  for (int i = 0; i < 4; ++i) {
    s.wait(1);
  }
  s.send(s.request(1, Kind::kHeartbeat));
  EXPECT_TRUE(s.last(1, Kind::kAlive).error == std::nullopt);
  s.wait(100); // stopped
  EXPECT_EQ(s.server.peer_state(0), PeerState::kUp);
  s.wait(1);
  EXPECT_EQ(s.server.peer_state(0), PeerState::kLost);
  EXPECT_EQ(s.server.peer_state(1), PeerState::kUp);
  EXPECT_EQ(
      s.view()->clock, (std::vector<std::pair<int32_t, int64_t>>{{1, 0}}));
}

TEST(ServerSessionTest, ALossIsFatalWithSync) {
  ServerScript s(ServerScript::config(kSync));
  for (const int64_t number : {1, 2}) {
    for (const int32_t rank : {0, 1, 2}) {
      s.push(rank, number);
    }
  }
  const auto round = s.begun()[0];
  s.lose(2);
  EXPECT_EQ(s.answers(0, Kind::kError).size(), 2); // at once
  EXPECT_EQ(s.last(0, Kind::kFatal).error->code, ErrorCode::kWorkerLost);
  EXPECT_EQ(s.last(0, Kind::kFatal).error->who, 2);
  EXPECT_TRUE(s.messages(2, Kind::kFatal).empty());
  s.apply(round);
  EXPECT_EQ(s.begun().size(), 1); // no round begins
  const int64_t pull = s.pull(1);
  EXPECT_EQ(s.last(1, Kind::kError).opno, pull);
  s.send(s.request(1, Kind::kHeartbeat));
  EXPECT_EQ(s.last(1, Kind::kAlive).error->who, 2);
}

TEST(ServerSessionTest, AWorkerTellsTheCause) {
  ServerScript s(ServerScript::config(kSync));
  Message beat = s.request(1, Kind::kHeartbeat);
  beat.error = Error{ErrorCode::kServerLost, 3, {}, {}, {}};
  s.send(beat);
  EXPECT_EQ(s.last(0, Kind::kFatal).error->code, ErrorCode::kServerLost);
  ServerScript async(ServerScript::config(1));
  async.send(beat);
  EXPECT_TRUE(async.messages(0, Kind::kFatal).empty());
}

TEST(ServerSessionTest, RefusedOperationsAreFatalWithSyncOnly) {
  for (const bool sync : {true, false}) {
    ServerScript s(ServerScript::config(sync ? kSync : std::optional(1)));
    const int64_t wrong = s.push(1, 5); // a round out of order
    if (sync) {
      EXPECT_EQ(s.last(0, Kind::kFatal).error->code, ErrorCode::kRound);
      EXPECT_EQ(s.last(0, Kind::kFatal).error->who, 1);
      continue;
    }
    EXPECT_EQ(s.last(1, Kind::kError).opno, wrong);
    const int64_t next = s.push(1, 1); // the stream has failed
    EXPECT_EQ(s.last(1, Kind::kError).opno, next);
    EXPECT_EQ(s.last(1, Kind::kError).error->code, ErrorCode::kRound);
    s.push(0, 1);
    EXPECT_EQ(s.begun().size(), 1);
    s.init(1); // a stream that has not ended: nothing
    EXPECT_EQ(s.answers(1, Kind::kDone).size(), 1);
  }
}

TEST(ServerSessionTest, ShapesAreCompared) {
  ServerScript s(ServerScript::config(1), nullptr, false);
  for (const int32_t rank : {0, 1, 2}) {
    s.hello(rank);
  }
  s.init(0);
  Message other = s.operation(1, Kind::kInit, ServerScript::slice());
  other.spec.whole = true;
  s.send(other);
  EXPECT_EQ(s.last(1, Kind::kError).error->code, ErrorCode::kShape);
  EXPECT_EQ(s.last(1, Kind::kError).error->who, 1);
  s.init(2);
  Message push = s.operation(2, Kind::kPush, ServerScript::slice());
  push.round = 1;
  s.send_parts(push, {1, 2, 3});
  EXPECT_EQ(s.last(2, Kind::kError).error->code, ErrorCode::kShape);
  EXPECT_TRUE(s.begun().empty());
}

TEST(ServerSessionTest, InitsWaitForRank0) {
  ServerScript s(ServerScript::config(1), nullptr, false);
  for (const int32_t rank : {0, 1, 2}) {
    s.hello(rank);
  }
  const int64_t init = s.init(1);
  Message again = s.request(1, Kind::kInit);
  again.slice = ServerScript::slice();
  again.spec = ServerScript::spec();
  again.opno = init;
  s.send(again);
  EXPECT_EQ(s.last(1, Kind::kWait).missing, Ranks{0});
  s.lose(0);
  EXPECT_EQ(s.last(1, Kind::kError).error->code, ErrorCode::kWorkerLost);
  s.init(2);
  EXPECT_EQ(s.last(2, Kind::kError).error->who, 0);
}

TEST(ServerSessionTest, WaitNamesTheRanksThatHaveNotPushed) {
  ServerScript s(ServerScript::config(kSync));
  Message push = s.operation(1, Kind::kPush, ServerScript::slice());
  push.round = 1;
  s.send_parts(push, {1, 1, 1, 1});
  push.pieces = 2;
  s.send(push); // asks
  EXPECT_EQ(s.last(1, Kind::kWait).opno, push.opno);
  EXPECT_EQ(s.last(1, Kind::kWait).missing, (Ranks{0, 2}));
}

TEST(ServerSessionTest, ABarrierWaitsForThePushesBefore) {
  ServerScript s(ServerScript::config(1, 2));
  s.push(0, 1);
  const int64_t enter = s.control(0, Kind::kEnter, with_counts(1));
  const int64_t other = s.control(1, Kind::kEnter, with_counts(0));
  EXPECT_FALSE(s.has(0, Kind::kDone, enter));
  EXPECT_TRUE(s.has(1, Kind::kDone, other));
  s.apply_all();
  EXPECT_TRUE(s.has(0, Kind::kDone, enter));
  const int64_t meet = s.control(1, Kind::kMeet);
  EXPECT_FALSE(s.has(1, Kind::kDone, meet));
  s.control(0, Kind::kMeet);
  EXPECT_TRUE(s.has(1, Kind::kDone, meet));
  EXPECT_EQ(s.last(1, Kind::kDone).phase, 1);
  EXPECT_EQ(s.last(0, Kind::kDone).phase, 1);
}

TEST(ServerSessionTest, ABarrierDoesNotWaitForWhoIsLost) {
  ServerScript s(ServerScript::config(1));
  for (const int32_t rank : {0, 1}) {
    s.control(rank, Kind::kMeet);
  }
  EXPECT_EQ(s.last(0, Kind::kDone).phase, 0);
  s.lose(2);
  EXPECT_EQ(s.last(0, Kind::kDone).phase, 1);
  EXPECT_EQ(s.last(1, Kind::kDone).phase, 1);
}

TEST(ServerSessionTest, WhoWaitsInABarrierHoldsNobodyUp) {
  Config config = ServerScript::config(1, 2);
  config.policy.staleness = 0;
  ServerScript s(config);
  s.control(1, Kind::kEnter, with_counts(0));
  for (const int64_t round : {1, 2}) {
    s.push(0, round);
    s.apply_all();
  }
  EXPECT_EQ(s.view()->version, 2);
  s.pull(1); // it has left the barrier, perhaps with an error
  s.push(0, 3);
  EXPECT_EQ(s.begun().size(), 2);
}

TEST(ServerSessionTest, GraceEndsBelowTheQuorum) {
  Config config = ServerScript::config(2);
  config.policy.grace = 0.3;
  ServerScript s(config);
  s.push(1, 1);
  s.push(2, 1);
  s.lose(2);
  s.wait(0.4);
  EXPECT_TRUE(s.begun().empty());
  s.wait(0.6); // out of patience
  EXPECT_EQ(s.begun().size(), 1);
}

TEST(ServerSessionTest, ABarrierEndsByARefusedPush) {
  ServerScript s(ServerScript::config(1, 2));
  s.push(0, 7);
  const int64_t enter = s.control(0, Kind::kEnter, with_counts(7));
  EXPECT_EQ(s.last(0, Kind::kError).opno, enter);
  EXPECT_EQ(s.last(0, Kind::kError).error->code, ErrorCode::kRound);
}

TEST(ServerSessionTest, UnequalCountsAreFatalWithSync) {
  ServerScript s(ServerScript::config(kSync, 2));
  const int64_t meet = s.control(0, Kind::kMeet, with_counts(1));
  s.control(1, Kind::kMeet);
  EXPECT_EQ(s.last(0, Kind::kFatal).error->code, ErrorCode::kNeverPushed);
  EXPECT_EQ(s.last(0, Kind::kFatal).error->who, 1);
  EXPECT_EQ(s.last(0, Kind::kFatal).error->slice, ServerScript::slice());
  EXPECT_EQ(s.last(0, Kind::kError).opno, meet);
}

TEST(ServerSessionTest, WhoLeavesEarlyIsNamed) {
  ServerScript s(ServerScript::config(kSync));
  s.push(0, 1);
  s.control(2, Kind::kClose);
  EXPECT_EQ(s.last(0, Kind::kFatal).error->code, ErrorCode::kLeft);
  EXPECT_EQ(s.last(0, Kind::kFatal).error->who, 2);
}

TEST(ServerSessionTest, CloseWaitsForAllMembersAndForRounds) {
  ServerScript s(ServerScript::config(kSync));
  for (const int32_t rank : {0, 1, 2}) {
    s.push(rank, 1);
  }
  const auto round = s.begun()[0];
  const int64_t close = s.control(0, Kind::kClose);
  s.control(1, Kind::kClose);
  s.control(2, Kind::kClose);
  EXPECT_FALSE(s.has(0, Kind::kDone, close));
  s.apply(round);
  EXPECT_TRUE(s.has(0, Kind::kDone, close));
  EXPECT_EQ(s.server.peer_state(1), PeerState::kClosed);
}

TEST(ServerSessionTest, APushWaitsForItsOptions) {
  ServerScript s(ServerScript::config(1, 2));
  const auto of_gen = [](int64_t gen) {
    return [=](Message& message) { message.gen = gen; };
  };
  s.push(1, 1, of_gen(1));
  EXPECT_TRUE(s.begun().empty());
  s.control(0, Kind::kConfig, [](Message& message) {
    message.gen = 1;
    message.payload = ServerScript::blob({42});
  });
  ASSERT_EQ(s.begun().size(), 1);
  EXPECT_EQ(s.begun()[0]->gen, 1);
  EXPECT_EQ(ServerScript::join({s.begun()[0]->options}), Values{42});
  s.apply_all();
  s.push(0, 1); // of generation 0, but the key's never goes back
  EXPECT_EQ(s.begun()[1]->gen, 1);
  s.apply_all();
  s.control(0, Kind::kConfig, [](Message& message) {
    message.gen = 5;
    message.retire = 5;
    message.payload = ServerScript::blob({43});
  });
  s.push(0, 2, of_gen(3)); // retired: the next higher one
  EXPECT_EQ(s.begun()[2]->gen, 3);
  EXPECT_EQ(ServerScript::join({s.begun()[2]->options}), Values{43});
}

TEST(ServerSessionTest, OnlyTheHeirOfRank0IsToldTheLatestOptions) {
  ServerScript s(ServerScript::config(1, 2));
  s.control(0, Kind::kConfig, [](Message& message) {
    message.gen = 1;
    message.payload = ServerScript::blob({41});
  });
  EXPECT_EQ(s.last(0, Kind::kWelcome).payload.size(), 0);
  s.hello(1, 2);
  EXPECT_EQ(s.last(1, Kind::kWelcome).gen, 1);
  EXPECT_EQ(s.last(1, Kind::kWelcome).payload.size(), 0);
  s.hello(0, 2);
  EXPECT_EQ(s.last(0, Kind::kWelcome).gen, 1);
  EXPECT_EQ(
      ServerScript::join({s.last(0, Kind::kWelcome).payload}), Values{41});
}

TEST(ServerSessionTest, WithoutRank0NobodyWaitsForOptions) {
  ServerScript s(ServerScript::config(1, 2));
  s.push(1, 1, [](Message& message) { message.gen = 1; });
  EXPECT_TRUE(s.begun().empty());
  s.lose(0);
  ASSERT_EQ(s.begun().size(), 1);
  EXPECT_EQ(s.begun()[0]->options.size(), 0);
}

TEST(ServerSessionTest, ValuesInFlightAreBoundedByCredit) {
  Config config = ServerScript::config(1);
  config.frame_pieces = 1;
  config.credit = 1;
  ServerScript s(config);
  const int64_t pull = s.pull(1);
  EXPECT_EQ(s.messages(1, Kind::kValue).size(), 1);
  Message got = s.request(1, Kind::kGot);
  got.got = {{pull, 0}};
  s.send(got);
  EXPECT_EQ(s.messages(1, Kind::kValue).size(), 2);
}

} // namespace
} // namespace torchkv::dist

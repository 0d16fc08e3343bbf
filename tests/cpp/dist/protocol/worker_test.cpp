// Worker: what it sends for each call, in which frames, how often, and how
// calls end when nothing is lost.
#include "dist/protocol/worker.h"

#include <gtest/gtest.h>

#include <cmath>

#include "worker_scene.h"

namespace torchkv::dist {
namespace {

using Lines = std::vector<std::string>;
using RK = Request::Kind;

TEST(WorkerTest, IsReadyWhenEveryServerHasBeenHeardOf) {
  WorkerScene scene(test_config(2, std::nullopt));
  EXPECT_FALSE(scene.worker.ready());
  scene.tick(0);
  EXPECT_EQ(scene.log(), (Lines{"HELLO", "HELLO"}));
  Message welcome = scene.from(0, Kind::kWelcome);
  welcome.snap = 4;
  welcome.header.committed = 6;
  scene.give(welcome);
  EXPECT_FALSE(scene.worker.ready());
  EXPECT_EQ(scene.worker.link_state(0), LinkState::kUp);
  EXPECT_EQ(scene.worker.link_state(1), LinkState::kHello);
  scene.tick(1);
  ASSERT_EQ(scene.sent.size(), 2);
  EXPECT_EQ(scene.sent[0].kind, Kind::kHeartbeat);
  EXPECT_EQ(scene.sent[0].header.sinc, 70);
  EXPECT_EQ(scene.sent[0].header.digest, 99);
  EXPECT_EQ(scene.sent[1].kind, Kind::kHello);
  scene.welcome(1);
  EXPECT_TRUE(scene.worker.ready());
  EXPECT_EQ(scene.worker.snapshot(), 4);
  EXPECT_EQ(scene.worker.generation(), 6);
}

TEST(WorkerTest, APushIsSentUntilTheServerHasItAndThenAskedFor) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"w"}, 8);
  Request push = request(RK::kPush, {"w"}, 8);
  push.items[0].value = bytes(32, 50);
  const CallId id = scene.call(push);
  ASSERT_EQ(scene.sent.size(), 2);
  for (const size_t i : {0, 1}) {
    const Message& piece = scene.sent[i];
    EXPECT_EQ(piece.kind, Kind::kPush);
    EXPECT_EQ(piece.slice, (SliceId{"w", 0}));
    EXPECT_EQ(piece.index, i);
    EXPECT_EQ(piece.pieces, 2);
    EXPECT_EQ(piece.opno, 2);
    EXPECT_EQ(piece.prev, 1);
    EXPECT_EQ(piece.acked, 2);
    EXPECT_EQ(piece.round, 1);
    EXPECT_EQ(piece.total, 8);
    EXPECT_EQ(piece.header.floor, 2);
    // Not a copy.
    EXPECT_EQ(piece.payload.data(), push.items[0].value.data() + (i * 16));
    EXPECT_EQ(piece.payload.size(), 16);
  }
  scene.take_sent();
  scene.got(2, {1});
  scene.run(1.5); // at 1 s the frame gives its credit back
  EXPECT_EQ(scene.log(), Lines{});
  scene.run(0.5);
  EXPECT_EQ(scene.log(), Lines{"PUSH 2.0"});
  scene.got(2, {0});
  scene.tick(1);
  EXPECT_EQ(scene.log(), Lines{"PUSH 2"});
  Message wait = scene.from(0, Kind::kWait, 2);
  wait.missing = {3};
  scene.give(wait);
  scene.tick(1);
  EXPECT_EQ(scene.log(), Lines{"PUSH 2"});
  EXPECT_FALSE(scene.has_ended(id));
  EXPECT_EQ(scene.worker.num_operations(), 1);
  Message done = scene.from(0, Kind::kDone, 2);
  done.version = 7;
  done.age = 3;
  scene.give(done);
  const Return end = scene.ended(id);
  EXPECT_FALSE(end.error);
  ASSERT_EQ(end.results.size(), 1);
  EXPECT_EQ(end.results[0].slice, (SliceId{"w", 0}));
  EXPECT_EQ(end.results[0].version, 7);
  EXPECT_EQ(end.results[0].age, 3);
  EXPECT_EQ(scene.worker.num_operations(), 0);
  scene.done(2); // a copy of the answer
  scene.tick(1);
  EXPECT_EQ(scene.log(), Lines{});
  EXPECT_EQ(scene.returns.size(), 1);
}

TEST(WorkerTest, SlicesOnTheRanksOwnServerAreTakenFromItsOwnValue) {
  Config config = test_config(2, std::nullopt);
  config.split_bytes = 64;
  WorkerScene scene(config, 1);
  scene.start();
  scene.init({"w"}, 64);
  Request push = request(RK::kPushPull, {"w"}, 64);
  push.items[0].own = bytes(256);
  scene.call(push);
  bool was_own = false;
  bool was_other = false;
  for (const Message& piece : scene.sent) {
    const bool is_own = piece.header.server == 1;
    const Blob& from = is_own ? push.items[0].own : push.items[0].value;
    const std::byte* const data = piece.payload.data();
    EXPECT_GE(data, from.data());
    EXPECT_LT(data, from.data() + from.size());
    was_own = was_own || is_own;
    was_other = was_other || !is_own;
  }
  EXPECT_TRUE(was_own && was_other);
}

TEST(WorkerTest, AWaitTellsThatTheServerHasAllPieces) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"w"}, 8);
  scene.call(request(RK::kPush, {"w"}, 8));
  scene.clear();
  scene.give(scene.from(0, Kind::kWait, 2));
  scene.tick(1);
  EXPECT_EQ(scene.log(), Lines{"PUSH 2"});
}

TEST(WorkerTest, CallsThatBeginTogetherShareFrames) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"a", "b", "c"}, 2);
  Request push = request(RK::kPush, {"a", "b"}, 2);
  push.items[1].priority = 3;
  scene.worker.call(push, scene.now, 10);
  scene.worker.call(request(RK::kPush, {"c"}, 2), scene.now, 10);
  scene.worker.call(request(RK::kPull, {"a"}), scene.now, 10);
  scene.worker.call(request(RK::kPull, {"c"}), scene.now, 10);
  scene.collect();
  ASSERT_EQ(scene.frames.size(), 2);
  EXPECT_EQ(
      scene.log(),
      (Lines{"PULL 7", "PULL 8", "PUSH 5.0", "PUSH 4.0", "PUSH 6.0"}));
}

TEST(WorkerTest, FramesAreCutByPiecesAndBytesAndWaitForCredit) {
  Config config = test_config(1, std::nullopt);
  config.frame_bytes = 32;
  WorkerScene scene(config);
  scene.start();
  scene.init({"w"}, 24);
  scene.call(request(RK::kPush, {"w"}, 24)); // six pieces
  ASSERT_EQ(scene.frames.size(), 2);
  EXPECT_EQ(
      scene.log(), (Lines{"PUSH 2.0", "PUSH 2.1", "PUSH 2.2", "PUSH 2.3"}));
  scene.got(2, {0});
  EXPECT_EQ(scene.log(), Lines{});
  scene.got(2, {1});
  EXPECT_EQ(scene.log(), (Lines{"PUSH 2.4", "PUSH 2.5"}));
  // A frame unheard of gives its credit back.
  scene.run(2);
  EXPECT_EQ(
      scene.log(), (Lines{"PUSH 2.2", "PUSH 2.3", "PUSH 2.4", "PUSH 2.5"}));
}

TEST(WorkerTest, APullIsPutTogetherAndItsPiecesAreConfirmedByOneMessage) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"w", "x"}, 7);
  Request pull = request(RK::kPull, {"w"});
  pull.items[0].min_version = 5;
  pull.items[0].priority = 2;
  const CallId id = scene.call(pull);
  ASSERT_EQ(scene.sent.size(), 1);
  EXPECT_EQ(scene.sent[0].min_version, 5);
  EXPECT_EQ(scene.sent[0].priority, 2);
  EXPECT_EQ(scene.sent[0].index, -1);
  scene.clear();
  Message second = scene.value(0, 3, bytes(12, 16));
  second.pieces = 2;
  second.index = 1;
  second.version = 9;
  second.kid = 2;
  Message other = scene.value(0, 77, bytes(5)); // answered long ago
  scene.give(Frame{second, other});
  ASSERT_EQ(scene.sent.size(), 1);
  EXPECT_EQ(scene.sent[0].kind, Kind::kGot);
  EXPECT_EQ(
      scene.sent[0].got,
      (std::vector<std::pair<int64_t, int32_t>>{{3, 1}, {77, 0}}));
  scene.clear();
  scene.tick(1);
  ASSERT_EQ(scene.sent.size(), 2);
  EXPECT_EQ(scene.sent[1].have, std::vector<int32_t>{1});
  Message first = second;
  first.index = 0;
  first.payload = bytes(16);
  scene.give(first);
  const Return end = scene.ended(id);
  ASSERT_EQ(end.results.size(), 1);
  ASSERT_EQ(end.results[0].pieces.size(), 2);
  EXPECT_EQ(end.results[0].pieces[0].data(), first.payload.data());
  EXPECT_EQ(end.results[0].pieces[1].data(), second.payload.data());
  EXPECT_EQ(end.results[0].version, 9);
  EXPECT_EQ(scene.worker.version(SliceId{"w", 0}), 9);
  EXPECT_EQ(scene.worker.version(SliceId{"x", 0}), 0);
  EXPECT_EQ(scene.worker.version(SliceId{"x", 1}), std::nullopt);
  EXPECT_EQ(scene.worker.version(SliceId{"y", 0}), std::nullopt);
}

TEST(WorkerTest, OnlyRankZeroSendsTheFirstValueAndAnInitCarriesTheSpec) {
  for (const int32_t rank : {0, 1}) {
    WorkerScene scene(test_config(1, std::nullopt), rank);
    scene.start();
    Request init = request(RK::kInit, {"w"}, 4);
    init.items[0].spec.sizes = {2, 2};
    const CallId id = scene.call(init);
    ASSERT_EQ(scene.sent.size(), 1);
    EXPECT_EQ(scene.sent[0].spec, init.items[0].spec);
    EXPECT_EQ(scene.sent[0].pieces, rank == 0 ? 1 : 0);
    EXPECT_EQ(scene.sent[0].payload.size(), rank == 0 ? 16 : 0);
    Message done = scene.from(0, Kind::kDone, 1);
    done.round = 5;
    done.version = 6;
    scene.give(done);
    EXPECT_FALSE(scene.ended(id).error);
    scene.clear();
    scene.call(request(RK::kPush, {"w"}, 4));
    EXPECT_EQ(scene.sent.at(0).round, 6);
    EXPECT_EQ(scene.sent.at(0).base, 6);
  }
}

TEST(WorkerTest, ASplitKeyIsAnOperationOfEachServerInOneCall) {
  Config config = test_config(2, std::nullopt);
  config.split_bytes = 64;
  WorkerScene scene(config);
  scene.start();
  scene.init({"w"}, 40);
  const CallId id = scene.call(request(RK::kPull, {"w"}));
  ASSERT_EQ(scene.sent.size(), 2);
  const auto places = place("w", floats(40), 2, 64);
  ASSERT_EQ(places.size(), 2);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(scene.sent[i].slice, (SliceId{"w", places[i].index}));
    EXPECT_EQ(scene.sent[i].header.server, places[i].server);
  }
  const std::vector<Message> asked = scene.take_sent();
  for (const size_t i : {1, 0}) {
    EXPECT_FALSE(scene.has_ended(id));
    const auto size = static_cast<size_t>(places[i].end - places[i].begin) * 4;
    for (size_t at = 0; at < size; at += 16) {
      const size_t rest = std::min<size_t>(16, size - at);
      Message piece =
          scene.value(asked[i].header.server, asked[i].opno, bytes(rest));
      piece.pieces = static_cast<int32_t>((size + 15) / 16);
      piece.index = static_cast<int32_t>(at / 16);
      scene.give(piece);
    }
  }
  const Return end = scene.ended(id);
  ASSERT_EQ(end.results.size(), 2); // in the order of the slices
  EXPECT_EQ(end.results[0].slice.index, 0);
  EXPECT_EQ(end.results[1].slice.index, 1);
}

TEST(WorkerTest, AnInitThatHasTimedOutMayBeRepeated) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  const CallId late = scene.call(request(RK::kInit, {"w"}), 2);
  scene.run(3);
  EXPECT_EQ(error_in(scene.ended(late)).code, ErrorCode::kTimeout);
  scene.clear();
  const CallId again = scene.call(request(RK::kInit, {"w"}));
  ASSERT_EQ(scene.sent.size(), 1);
  // The next operation of the stream, whose first has no answer yet.
  EXPECT_EQ(scene.sent[0].opno, 2);
  EXPECT_EQ(scene.sent[0].prev, 1);
  EXPECT_EQ(scene.sent[0].acked, 1);
  scene.done(1);
  EXPECT_FALSE(scene.has_ended(again));
  scene.done(2);
  EXPECT_FALSE(scene.ended(again).error);
  scene.call(request(RK::kPush, {"w"}));
  EXPECT_EQ(scene.sent.back().prev, 2);
  EXPECT_EQ(scene.sent.back().acked, 3);
}

TEST(WorkerTest, AnInitOfAnotherShapeIsTheNextOfItsStream) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.call(request(RK::kInit, {"w"}), 2);
  scene.run(3);
  scene.clear();
  scene.call(request(RK::kInit, {"w"}, /*total=*/3));
  EXPECT_EQ(scene.sent[0].prev, 1);
}

TEST(WorkerTest, ABarrierOfDistSyncMeetsAtServerZeroWithTheCounts) {
  WorkerScene scene(test_config(2, std::nullopt));
  scene.start();
  scene.init({1, 2});
  scene.call(request(RK::kPush, {2}));
  scene.clear();
  const CallId id = scene.call(request(RK::kBarrier));
  ASSERT_EQ(scene.sent.size(), 1);
  EXPECT_EQ(scene.sent[0].kind, Kind::kMeet);
  EXPECT_EQ(scene.sent[0].header.server, 0);
  EXPECT_EQ(
      scene.sent[0].counts, (Counts{{SliceId{1, 0}, 0}, {SliceId{2, 0}, 1}}));
  Message done = scene.from(0, Kind::kDone, scene.sent[0].opno);
  done.phase = 5;
  scene.give(done);
  EXPECT_FALSE(scene.ended(id).error);
  scene.tick(1);
  EXPECT_EQ(scene.sent.back().header.phase, 5);
}

TEST(WorkerTest, ABarrierOfOtherModesEntersEverywhereFirst) {
  WorkerScene scene(test_config(2, 1));
  scene.start();
  const CallId id = scene.call(request(RK::kBarrier));
  EXPECT_EQ(scene.log(), (Lines{"ENTER 1", "ENTER 2"}));
  scene.done(2, 1);
  EXPECT_EQ(scene.log(), Lines{});
  scene.done(1, 0);
  EXPECT_EQ(scene.log(), Lines{"MEET 3"});
  EXPECT_FALSE(scene.has_ended(id));
  scene.done(3, 0);
  const Return end = scene.ended(id);
  ASSERT_EQ(end.results.size(), 2);
  EXPECT_TRUE(end.results[0].slice.is_server());
  EXPECT_EQ(end.results[1].server, 1);
}

TEST(WorkerTest, OptionsAreNumberedAndCommittedWhenAllServersHaveThem) {
  WorkerScene scene(test_config(2, std::nullopt), 0);
  scene.start();
  scene.init({"w"});
  scene.call(request(RK::kPush, {"w"}));
  EXPECT_EQ(scene.sent.at(0).gen, 0);
  scene.clear();
  Request set = request(RK::kConfig);
  set.options = bytes(3);
  const CallId id = scene.call(set);
  ASSERT_EQ(scene.sent.size(), 2);
  EXPECT_EQ(scene.sent[0].gen, 1);
  EXPECT_EQ(scene.sent[0].retire, 0); // of the push
  EXPECT_EQ(scene.sent[0].pieces, 0);
  EXPECT_EQ(scene.sent[0].index, -1);
  EXPECT_EQ(scene.sent[0].payload.data(), set.options.data());
  EXPECT_EQ(scene.worker.generation(), 1);
  scene.done(scene.sent[0].opno, 0);
  scene.clear();
  scene.call(request(RK::kPush, {"w"}));
  EXPECT_EQ(scene.sent.at(0).gen, 1);
  EXPECT_EQ(scene.sent.at(0).header.committed, 0);
  scene.done(4, 1);
  EXPECT_FALSE(scene.ended(id).error);
  scene.clear();
  scene.tick(1);
  EXPECT_EQ(scene.sent.at(0).header.committed, 1);
}

TEST(WorkerTest, CloseWaitsForCallsThatHaveNotEnded) {
  WorkerScene scene(test_config(2, std::nullopt));
  scene.start();
  scene.init({"w"});
  const CallId push = scene.call(request(RK::kPush, {"w"}));
  const int32_t server = scene.sent.at(0).header.server;
  scene.clear();
  const CallId close = scene.call(request(RK::kClose));
  EXPECT_EQ(scene.log(), Lines{});
  scene.done(2, server);
  EXPECT_FALSE(scene.ended(push).error);
  EXPECT_EQ(scene.log(), (Lines{"CLOSE 3", "CLOSE 4"}));
  scene.done(3, 0);
  EXPECT_FALSE(scene.has_ended(close));
  scene.done(4, 1);
  EXPECT_FALSE(scene.ended(close).error);
  EXPECT_EQ(scene.log(), (Lines{"BYE", "BYE"}));
}

TEST(WorkerTest, AStepInTwoPhasesIsDecidedByTheSumOfItsNorms) {
  WorkerScene scene(test_config(1, std::nullopt), 0);
  scene.start();
  scene.init({"b", "a"});
  Request push = request(RK::kPush, {"b", "a"});
  push.two_phase = true;
  std::vector<double> totals;
  push.factor = [&](double total) {
    totals.push_back(total);
    return total / 4;
  };
  const CallId id = scene.call(push, 5);
  for (const auto& message : scene.sent) {
    EXPECT_EQ(message.group, (Group{SliceId{"a", 0}, 1, 1}));
  }
  EXPECT_EQ(scene.log(), (Lines{"NORM 5", "NORM 6", "PUSH 3.0", "PUSH 4.0"}));
  Message norm = scene.from(0, Kind::kDone, 6);
  norm.partial = 1e16; // of a, and so the first to be added
  scene.give(norm);
  EXPECT_EQ(scene.log(), Lines{});
  // The step is not the call: it goes on when the call has timed out.
  scene.run(6);
  EXPECT_EQ(error_in(scene.ended(id)).code, ErrorCode::kTimeout);
  scene.clear();
  norm.opno = 5;
  norm.partial = 3;
  scene.give(norm);
  EXPECT_EQ(totals, std::vector<double>{1e16 + 3});
  ASSERT_EQ(scene.sent.size(), 2);
  EXPECT_EQ(scene.sent[0].factor, (1e16 + 3) / 4);
  EXPECT_EQ(scene.sent[0].round, 1);
  EXPECT_EQ(scene.log(), (Lines{"FACTOR 7", "FACTOR 8"}));
}

TEST(WorkerTest, AFactorThatIsNotFiniteSkipsTheStep) {
  WorkerScene scene(test_config(1, std::nullopt), 0);
  scene.start();
  scene.init({"w"});
  Request push = request(RK::kPushPull, {"w"});
  push.two_phase = true;
  push.factor = [](double total) { return total; };
  const CallId id = scene.call(push);
  scene.clear();
  Message norm = scene.from(0, Kind::kDone, 3);
  norm.partial = std::nan("");
  scene.give(norm);
  EXPECT_EQ(scene.sent.at(0).factor, 0);
  scene.give(scene.value(0, 2, bytes(8)));
  EXPECT_FALSE(scene.has_ended(id));
  scene.done(4);
  const Return end = scene.ended(id);
  ASSERT_EQ(end.results.size(), 1);
  EXPECT_EQ(end.results[0].pieces.size(), 1);
}

TEST(WorkerTest, OtherRanksOnlyPushInAStepOfTwoPhases) {
  WorkerScene scene(test_config(1, std::nullopt), 1);
  scene.start();
  scene.init({"w"});
  Request push = request(RK::kPush, {"w"});
  push.two_phase = true;
  scene.call(push);
  EXPECT_EQ(scene.sent.at(0).group, (Group{SliceId{"w", 0}, 1, 1}));
  EXPECT_EQ(scene.log(), Lines{"PUSH 2.0"});
}

TEST(WorkerTest, ACallOnNothingEndsAtOnce) {
  WorkerScene scene(test_config(1, std::nullopt), 0);
  scene.start();
  for (const auto kind : {RK::kInit, RK::kPush, RK::kPull, RK::kDelete}) {
    Request nothing = request(kind);
    nothing.two_phase = true;
    EXPECT_FALSE(scene.ended(scene.call(nothing)).error);
  }
  EXPECT_EQ(scene.log(), Lines{});
}

} // namespace
} // namespace torchkv::dist

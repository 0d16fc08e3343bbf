// Worker: calls that are refused, fail or time out; servers that are lost, and
// servers that send nonsense.
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "dist/protocol/worker.h"
#include "worker_scene.h"

namespace torchkv::dist {
namespace {

using Lines = std::vector<std::string>;
using RK = Request::Kind;

// A key whose only slice is on `server` of two.
Key key_on(int32_t server) {
  for (int64_t i = 0;; ++i) {
    if (place(i, floats(2), 2, 1048576)[0].server == server) {
      return i;
    }
  }
}

TEST(WorkerFailureTest, AListIsRefusedAsAWholeBeforeAnythingIsSent) {
  for (const auto kind :
       {RK::kPush, RK::kPushPull, RK::kPull, RK::kDelete, RK::kInit}) {
    WorkerScene scene(test_config(2, 1), 0);
    scene.start();
    const Key lost = key_on(1);
    const Key there = key_on(0);
    scene.init({lost, there});
    if (kind != RK::kInit) {
      const Return end = scene.ended(scene.call(request(kind, {there, "x"})));
      ASSERT_TRUE(end.error);
      EXPECT_EQ(error_in(end).code, ErrorCode::kUnknown);
      EXPECT_EQ(error_in(end).slice, (SliceId{"x", 0}));
      EXPECT_TRUE(end.results.empty());
    }
    if (kind != RK::kPull && kind != RK::kDelete) {
      Request wrong = request(kind, {there, lost});
      wrong.items[1].value = bytes(12);
      const Return end = scene.ended(scene.call(wrong));
      ASSERT_TRUE(end.error);
      EXPECT_EQ(error_in(end).code, ErrorCode::kShape);
      EXPECT_EQ(error_in(end).slice, (SliceId{lost, 0}));
    }
    scene.worker.on_peer_lost(1, scene.now);
    scene.collect();
    EXPECT_EQ(scene.worker.link_state(1), LinkState::kLost);
    const Return end = scene.ended(scene.call(request(kind, {there, lost})));
    ASSERT_TRUE(end.error);
    EXPECT_EQ(error_in(end).code, ErrorCode::kServerLost);
    EXPECT_EQ(error_in(end).who, 1);
    EXPECT_EQ(error_in(end).slice, (SliceId{lost, 0}));
    EXPECT_EQ(scene.log(), Lines{});
    EXPECT_EQ(scene.worker.num_operations(), 0);
    // No round was counted.
    scene.call(request(RK::kPush, {there}));
    if (kind != RK::kInit) {
      EXPECT_EQ(scene.sent.at(0).round, 1);
    }
  }
}

TEST(WorkerFailureTest, AnErrorEndsTheCallAtOnceAndTheOperationsGoOn) {
  WorkerScene scene(test_config(1, 1));
  scene.start();
  scene.init({"a", "b"});
  const CallId id = scene.call(request(RK::kPull, {"a", "b"}));
  scene.give(scene.error(0, 4, ErrorCode::kShape, 2));
  const Return end = scene.ended(id);
  ASSERT_TRUE(end.error);
  EXPECT_EQ(error_in(end).code, ErrorCode::kShape);
  EXPECT_EQ(error_in(end).who, 2);
  EXPECT_FALSE(scene.worker.fatal());
  EXPECT_EQ(scene.worker.num_operations(), 1);
  scene.clear();
  scene.tick(1);
  EXPECT_EQ(scene.log(), Lines{"PULL 3"});
  scene.give(scene.value(0, 3, bytes(8)));
  EXPECT_TRUE(scene.returns.empty());
  EXPECT_EQ(scene.worker.num_operations(), 0);
}

TEST(WorkerFailureTest, UpdaterErrorsAreToldByTheLeastSliceWhenAllHaveEnded) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"c", "a", "b"});
  const CallId id = scene.call(request(RK::kPush, {"c", "a", "b"}));
  const auto thrown = [&](int64_t opno, const Key& key) {
    Message message = scene.error(0, opno, ErrorCode::kUpdater);
    message.error =
        Error{ErrorCode::kUpdater, -1, SliceId{key, 0}, "it threw", {}};
    return message;
  };
  scene.give(Frame{thrown(4, "c"), thrown(6, "b")});
  EXPECT_FALSE(scene.has_ended(id));
  scene.done(5);
  const Return end = scene.ended(id);
  ASSERT_TRUE(end.error);
  EXPECT_EQ(error_in(end).code, ErrorCode::kUpdater);
  EXPECT_EQ(error_in(end).slice, (SliceId{"b", 0}));
  EXPECT_EQ(error_in(end).text, "it threw");
  EXPECT_FALSE(scene.worker.fatal());
}

TEST(WorkerFailureTest, ARefusedOperationOfDistSyncIsFatal) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"a"});
  const CallId first = scene.call(request(RK::kPush, {"a"}));
  const CallId second = scene.call(request(RK::kPull, {"a"}));
  scene.clear();
  scene.give(scene.error(0, 2, ErrorCode::kRound, 1));
  EXPECT_EQ(error_in(scene.ended(first)).code, ErrorCode::kRound);
  EXPECT_EQ(error_in(scene.ended(second)).code, ErrorCode::kRound);
  ASSERT_TRUE(scene.worker.fatal());
  EXPECT_EQ(scene.worker.fatal().value_or(Error()).who, 1);
  // The servers hear of it at once.
  ASSERT_EQ(scene.sent.size(), 1);
  EXPECT_EQ(scene.sent[0].kind, Kind::kHeartbeat);
  EXPECT_EQ(scene.sent[0].error, scene.worker.fatal());
  EXPECT_EQ(
      error_in(scene.ended(scene.call(request(RK::kBarrier)))).code,
      ErrorCode::kRound);
}

TEST(WorkerFailureTest, ATimeoutNamesTheRanksAndLeavesTheOperation) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"b", "a"});
  const CallId id = scene.call(request(RK::kPull, {"b", "a"}), 3);
  Message wait = scene.from(0, Kind::kWait, 3);
  wait.missing = {3, 0};
  scene.give(wait);
  wait.opno = 4;
  wait.missing = {2, 3, -1, 4};
  scene.give(wait);
  scene.run(2.5);
  EXPECT_FALSE(scene.has_ended(id));
  scene.run(0.5);
  const Return end = scene.ended(id);
  ASSERT_TRUE(end.error);
  EXPECT_EQ(error_in(end).code, ErrorCode::kTimeout);
  EXPECT_EQ(error_in(end).who, -1);
  EXPECT_EQ(error_in(end).missing, (std::vector<int32_t>{0, 2, 3}));
  EXPECT_EQ(error_in(end).slice, (SliceId{"b", 0}));
  EXPECT_EQ(scene.worker.num_operations(), 2);
  scene.clear();
  scene.give(scene.value(0, 3, bytes(8)));
  EXPECT_TRUE(scene.returns.empty());
  EXPECT_EQ(scene.worker.num_operations(), 1);
}

TEST(WorkerFailureTest, ATimeoutOfTheServerItselfNamesNoSlice) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  const CallId id = scene.call(request(RK::kBarrier), 1);
  scene.run(1);
  const Return end = scene.ended(id);
  EXPECT_EQ(error_in(end).code, ErrorCode::kTimeout);
  EXPECT_EQ(error_in(end).slice, std::nullopt);
}

TEST(WorkerFailureTest, AStoppedProcessBlamesNobody) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"a"});
  const CallId id = scene.call(request(RK::kPull, {"a"}), 3);
  scene.run(2);
  scene.tick(60);
  EXPECT_FALSE(scene.has_ended(id));
  EXPECT_EQ(scene.worker.link_state(0), LinkState::kUp);
  scene.run(1);
  EXPECT_EQ(error_in(scene.ended(id)).code, ErrorCode::kTimeout);
}

TEST(WorkerFailureTest, ASilentServerIsLost) {
  Config config = test_config(2, 1);
  WorkerScene scene(config);
  scene.welcome(0);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(scene.worker.link_state(0), LinkState::kUp);
    scene.tick(0.5);
  }
  EXPECT_EQ(scene.worker.link_state(0), LinkState::kUp);
  scene.tick(0.5);
  EXPECT_EQ(scene.worker.link_state(0), LinkState::kLost);
  EXPECT_EQ(scene.worker.link_state(1), LinkState::kHello);
  for (int i = 0; i < 600; ++i) {
    scene.tick(0.5);
  }
  EXPECT_EQ(scene.worker.link_state(1), LinkState::kLost);
  EXPECT_TRUE(scene.worker.ready());
}

TEST(WorkerFailureTest, ALostServerFailsOnlyWhatIsThere) {
  WorkerScene scene(test_config(2, 1), 0);
  scene.start();
  const Key lost = key_on(1);
  const Key there = key_on(0);
  scene.init({lost, there});
  const CallId bad = scene.call(request(RK::kPush, {lost}));
  const CallId good = scene.call(request(RK::kPush, {there}));
  const CallId set = scene.call(request(RK::kConfig));
  scene.clear();
  Message other = scene.from(1, Kind::kAlive);
  other.header.sinc = 999; // another process answers in its place
  scene.give(other);
  EXPECT_EQ(scene.worker.link_state(1), LinkState::kLost);
  const Return end = scene.ended(bad);
  EXPECT_EQ(error_in(end).code, ErrorCode::kServerLost);
  EXPECT_EQ(error_in(end).who, 1);
  EXPECT_EQ(error_in(end).slice, (SliceId{lost, 0}));
  EXPECT_FALSE(scene.has_ended(good));
  EXPECT_FALSE(scene.has_ended(set));
  scene.done(4);
  EXPECT_FALSE(scene.ended(good).error);
  scene.done(5);
  EXPECT_FALSE(scene.ended(set).error);
  // Snapshots need all servers, barriers need server 0, close needs none.
  EXPECT_EQ(
      error_in(scene.ended(scene.call(request(RK::kSnapshot)))).code,
      ErrorCode::kServerLost);
  const CallId barrier = scene.call(request(RK::kBarrier));
  scene.worker.on_peer_lost(0, scene.now);
  scene.collect();
  EXPECT_EQ(error_in(scene.ended(barrier)).who, 0);
  EXPECT_FALSE(scene.ended(scene.call(request(RK::kClose))).error);
}

TEST(WorkerFailureTest, ARefusedSnapshotIsNotCounted) {
  WorkerScene scene(test_config(2, 1), 0);
  scene.start();
  scene.init({key_on(0)});
  scene.worker.on_peer_lost(1, scene.now);
  scene.collect();
  const Return end = scene.ended(scene.call(request(RK::kSnapshot)));
  EXPECT_EQ(error_in(end).code, ErrorCode::kServerLost);
  EXPECT_EQ(error_in(end).who, 1);
  scene.clear();
  // Its number would make the servers keep values that nobody asks for.
  scene.call(request(RK::kPush, {key_on(0)}));
  EXPECT_EQ(scene.sent.at(0).snap, 0);
}

// Rank 0's predecessor was lost before all servers had its last options.
TEST(WorkerFailureTest, TheHeirOfRank0SendsItsLastOptionsToThoseThatLackThem) {
  WorkerScene scene(test_config(4, 1), 0);
  const auto welcome = [&](int32_t server, int64_t gen, uint8_t options) {
    Message message = scene.from(server, Kind::kWelcome);
    message.gen = gen;
    message.payload = bytes(1, options);
    scene.give(message);
  };
  welcome(0, 2, 20);
  welcome(1, 3, 30);
  welcome(2, 1, 10);
  EXPECT_EQ(scene.log(), Lines{}); // server 3 may have later ones
  scene.worker.on_peer_lost(3, scene.now); // not yet greeted: no loss
  scene.collect();
  EXPECT_FALSE(scene.worker.ready());
  welcome(3, 3, 30);
  ASSERT_EQ(scene.sent.size(), 2);
  for (const auto& message : scene.sent) {
    EXPECT_EQ(message.kind, Kind::kConfig);
    EXPECT_EQ(message.header.server, message.opno == 1 ? 0 : 2);
    EXPECT_EQ(message.gen, 3);
    ASSERT_EQ(message.payload.size(), 1);
    EXPECT_EQ(message.payload.data()[0], std::byte{30});
  }
  EXPECT_EQ(scene.log(), (Lines{"CONFIG 1", "CONFIG 2"}));
  scene.done(1, 0);
  scene.done(2, 2);
  welcome(3, 3, 30); // late copies
  scene.call(request(RK::kConfig));
  EXPECT_EQ(scene.sent.at(0).gen, 4);
}

TEST(WorkerFailureTest, ALostServerOfDistSyncIsFatalButNotDuringClose) {
  WorkerScene scene(test_config(2, std::nullopt));
  scene.start();
  const CallId close = scene.call(request(RK::kClose));
  scene.worker.on_peer_lost(1, scene.now);
  scene.collect();
  EXPECT_FALSE(scene.worker.fatal());
  scene.done(1, 0);
  EXPECT_FALSE(scene.ended(close).error);

  WorkerScene other(test_config(2, std::nullopt));
  other.start();
  other.worker.on_peer_lost(1, other.now);
  other.collect();
  ASSERT_TRUE(other.worker.fatal());
  EXPECT_EQ(
      other.worker.fatal().value_or(Error()).code, ErrorCode::kServerLost);
  EXPECT_EQ(other.sent.size(), 2); // also to the one believed lost
}

TEST(WorkerFailureTest, WhatAServerSaysOfTheWorkerItself) {
  const auto outcome = [](std::optional<int32_t> quorum,
                          const std::function<Message(WorkerScene&)>& make) {
    WorkerScene scene(test_config(1, quorum));
    scene.start();
    scene.give(make(scene));
    return scene.worker.fatal().value_or(
        Error{ErrorCode::kConfig, 77, {}, {}, {}});
  };
  const auto expired = [](int64_t by) {
    return [by](WorkerScene& scene) {
      Message message = scene.from(0, Kind::kExpired);
      message.by = by;
      return message;
    };
  };
  EXPECT_EQ(outcome(1, expired(kInc)).code, ErrorCode::kExpired);
  EXPECT_EQ(outcome(1, expired(kInc + 1)).code, ErrorCode::kSuperseded);
  EXPECT_EQ(outcome(std::nullopt, expired(kInc)).code, ErrorCode::kWorkerLost);
  EXPECT_EQ(outcome(std::nullopt, expired(kInc)).who, 1);
  for (const auto kind : {Kind::kReject, Kind::kFatal, Kind::kAlive}) {
    const auto told = [&](WorkerScene& scene) {
      Message message = scene.from(0, kind);
      message.error = Error{ErrorCode::kGroup, 3, {}, {}, {}};
      return message;
    };
    EXPECT_EQ(outcome(1, told).code, ErrorCode::kGroup);
  }
}

TEST(WorkerFailureTest, MessagesOfOtherStoresJobsAndIncarnationsAreDropped) {
  WorkerScene scene(test_config(1, 1));
  scene.start();
  const auto fatal = [&] {
    Message message = scene.from(0, Kind::kFatal);
    message.error = Error{ErrorCode::kGroup, 3, {}, {}, {}};
    return message;
  };
  for (int i = 0; i < 7; ++i) {
    Message message = fatal();
    Header& header = message.header;
    header.job += i == 0 ? 1 : 0;
    header.store += i == 1 ? 1 : 0;
    header.inc += i == 2 ? 1 : 0;
    header.rank += i == 3 ? 1 : 0;
    header.server = i == 4 ? 1 : i == 5 ? -1 : 0;
    header.committed = i == 6 ? -1 : 0;
    scene.give(message);
    EXPECT_FALSE(scene.worker.fatal()) << i;
  }
  scene.give(fatal());
  EXPECT_TRUE(scene.worker.fatal());
}

TEST(WorkerFailureTest, AnswersThatFitNoOperationAreDropped) {
  WorkerScene scene(test_config(2, 1), 0);
  scene.start();
  const Key key = key_on(0);
  scene.init({key}, 7); // two pieces, of 16 and 12 bytes
  const CallId push = scene.call(request(RK::kPush, {key}, 7));
  const CallId pull = scene.call(request(RK::kPull, {key}));
  scene.clear();
  const auto most = std::numeric_limits<int64_t>::max();
  const auto value = [&](int32_t index, int32_t pieces, size_t size) {
    Message message = scene.value(0, 3, bytes(size));
    message.index = index;
    message.pieces = pieces;
    return message;
  };
  Frame bad{
      value(-1, 2, 16),
      value(2, 2, 16),
      value(0, 1, 16),
      value(0, -2, 16),
      value(0, 2, 12),
      value(1, 2, 16),
      scene.value(0, 2, bytes(16)), // of a push
      scene.from(0, Kind::kDone, 3), // of a pull
      scene.from(0, Kind::kDone, 99),
      scene.from(0, Kind::kDone, -1),
      scene.from(1, Kind::kDone, 2), // of another server's operation
      scene.from(0, Kind::kError, 2), // of no error
      scene.from(0, Kind::kPush, 2), // of a worker
      scene.from(0, Kind::kReject)};
  Message lease = value(0, 2, 16);
  lease.region = Region{1, 2, 28}; // not configured
  bad.push_back(lease);
  Message done = scene.from(0, Kind::kDone, 2);
  done.version = -1;
  bad.push_back(done);
  done.version = most;
  bad.push_back(done);
  Message version = value(0, 2, 16);
  version.version = most;
  bad.push_back(version);
  Message got = scene.from(0, Kind::kGot);
  got.got = {{2, -1}, {2, 5}, {2, std::numeric_limits<int32_t>::max()}, {9, 0}};
  bad.push_back(got);
  scene.give(bad);
  EXPECT_TRUE(scene.returns.empty());
  EXPECT_TRUE(scene.others.empty());
  EXPECT_EQ(scene.log(), Lines{});
  EXPECT_EQ(scene.worker.num_operations(), 2);
  scene.give(Frame{value(1, 2, 12), value(1, 2, 12), value(0, 2, 16)});
  EXPECT_FALSE(scene.ended(pull).error);
  scene.done(2);
  EXPECT_FALSE(scene.ended(push).error);
}

// Whatever comes, the worker stays whole: sanitizers watch this test.
TEST(WorkerFailureTest, RandomMessagesAreHarmless) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](auto... values) {
      const std::vector<int64_t> all{static_cast<int64_t>(values)...};
      return all[random() % all.size()];
    };
    Config config = test_config(
        2, seed % 2 == 0 ? std::nullopt : std::optional<int32_t>(1));
    config.leases = seed % 3 == 0;
    config.push_regions = seed % 5 == 0;
    WorkerScene scene(config, 0, [](int32_t, size_t size) {
      return std::make_shared<const Region>(Region{1, 0, size});
    });
    scene.start();
    scene.init({1, 2, 3}, 7);
    CallId calls = scene.worker.fatal() ? 0 : 1;
    for (int step = 0; step < 200; ++step) {
      if (scene.worker.stalled() == 0 && step % 4 == 0) {
        Request next =
            request(static_cast<RK>(pick(1, 1, 2, 3, 3, 5, 6, 7)), {1, 2}, 7);
        next.two_phase = config.policy.is_sync() && random() % 2 == 0;
        next.factor = [](double total) { return total; };
        calls = scene.call(std::move(next), 4);
      }
      Frame frame;
      for (int i = 0; i < 3; ++i) {
        const auto max = std::numeric_limits<int64_t>::max();
        Message message = scene.from(
            static_cast<int32_t>(random() % 2),
            static_cast<Kind>(random() % kNumKinds),
            pick(0, -1, max, random() % 20, random() % 20, random() % 20));
        if (message.kind == Kind::kFatal || message.kind == Kind::kExpired ||
            message.kind == Kind::kReject) {
          continue;
        }
        message.pieces = static_cast<int32_t>(pick(2, 2, 1, 0, -1, 1000000000));
        message.index = static_cast<int32_t>(pick(0, 0, 1, 1, -1, 1000000000));
        message.payload = bytes(static_cast<size_t>(pick(16, 16, 12, 12, 0)));
        message.version = pick(1, 2, -1, max);
        message.round = pick(1, 2, -1, max);
        message.kid = pick(1, -1, max);
        message.phase = pick(0, 1, -1, max);
        message.gen = pick(0, 1, -1, max);
        message.partial = random() % 2 == 0 ? 1 : std::nan("");
        message.missing = {-1, 0, 3, 4, 1000000000};
        message.got = {
            {pick(1, 2, 3, max), static_cast<int32_t>(pick(0, 1, -1, 70))}};
        message.opnos = {pick(1, 2, 3, -1, max)};
        if (random() % 4 == 0) {
          message.region = Region{9, 0, random() % 2 == 0 ? 28U : 1U};
        }
        if (message.kind == Kind::kError && random() % 8 == 0) {
          message.error = Error{ErrorCode::kUpdater, -1, {}, "x", {}};
        }
        frame.push_back(std::move(message));
      }
      scene.give(frame);
      for (const auto& action : std::exchange(scene.others, {})) {
        if (const auto* copy = std::get_if<CopyOut>(&action)) {
          scene.worker.on_copied(
              copy->opno, bytes(28), 1, pick(1, 2), scene.now);
          scene.worker.on_copied(99, bytes(28), 1, 1, scene.now);
        }
      }
      scene.run(0.5);
    }
    scene.run(5);
    for (CallId id = 1; id <= calls; ++id) {
      EXPECT_TRUE(scene.has_ended(id) || id == 1) << seed << " " << id;
    }
  }
}

} // namespace
} // namespace torchkv::dist

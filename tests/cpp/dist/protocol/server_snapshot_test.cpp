// Server: snapshots, and what is restored from them.
#include <gtest/gtest.h>

#include <vector>

#include "dist/protocol/server.h"
#include "server_script.h"

namespace torchkv::dist {
namespace {

using Values = ServerScript::Values;
using Ranks = std::vector<int32_t>;

TEST(ServerSnapshotTest, ASnapshotIsOneVersion) {
  ServerScript s(ServerScript::config(1));
  s.push(1, 1);
  const auto round = s.begun()[0];
  const int64_t snapshot = s.control(0, Kind::kSnapshot, [](Message& message) {
    message.snap = 1;
    message.counts = pushes_of_k(0);
  });
  EXPECT_TRUE(s.all<WriteShard>().empty()); // the slice is busy
  s.apply(round);
  ASSERT_EQ(s.all<WriteShard>().size(), 1);
  const Shard& shard = s.all<WriteShard>()[0]->shard;
  ASSERT_EQ(shard.slices.size(), 1);
  EXPECT_EQ(shard.slices[0].second->version, 1);
  EXPECT_EQ(
      ServerScript::join(shard.slices[0].second->value->pieces),
      (Values{1, 1, 1, 1}));
  EXPECT_FALSE(s.has(0, Kind::kDone, snapshot));
  s.push(1, 2);
  EXPECT_TRUE(s.begun()[1]->in_snapshot);
  EXPECT_GT(s.begun()[1]->source.use_count(), 1); // must not be written
  s.server.on_written(1, std::nullopt, s.now);
  s.collect();
  EXPECT_TRUE(s.has(0, Kind::kDone, snapshot));
}

TEST(ServerSnapshotTest, AStampCapturesBeforeThePush) {
  ServerScript s(ServerScript::config(kSync, 2));
  const auto stamped = [](Message& message) { message.snap = 1; };
  s.push(0, 1);
  s.push(1, 1);
  s.push(0, 2, stamped);
  s.push(1, 2);
  s.apply_all();
  EXPECT_EQ(s.view()->version, 2);
  s.control(0, Kind::kSnapshot, [](Message& message) { // overtaken
    message.snap = 1;
    message.counts = pushes_of_k(1);
  });
  ASSERT_EQ(s.all<WriteShard>().size(), 1);
  EXPECT_EQ(s.all<WriteShard>()[0]->shard.slices[0].second->version, 1);
}

TEST(ServerSnapshotTest, ASnapshotThatWaitsNamesThoseWhoHoldUpItsPushes) {
  ServerScript s(ServerScript::config(kSync, 3));
  s.push(0, 1);
  const Message snapshot =
      s.operation(0, Kind::kSnapshot, SliceId(), [](Message& message) {
        message.snap = 1;
        message.counts = pushes_of_k(1);
      });
  s.send(snapshot);
  s.send(snapshot);
  EXPECT_EQ(s.last(0, Kind::kWait).missing, (Ranks{1, 2}));
  s.push(1, 1);
  s.send(snapshot);
  EXPECT_EQ(s.last(0, Kind::kWait).missing, Ranks{2});
  s.push(2, 1);
  s.apply_all();
  s.send(snapshot);
  EXPECT_TRUE(s.last(0, Kind::kWait).missing.empty()); // for the file
}

TEST(ServerSnapshotTest, AShardThatIsNotWrittenIsAnErrorAndDropsItsCaptures) {
  ServerScript s(ServerScript::config(kSync, 1));
  const int64_t snapshot = s.control(0, Kind::kSnapshot, [](Message& message) {
    message.snap = 1;
    message.counts = pushes_of_k(0);
  });
  s.server.on_written(1, "the disk is full", s.now);
  s.collect();
  const Message answer = s.last(0, Kind::kError);
  EXPECT_EQ(answer.opno, snapshot);
  EXPECT_EQ(
      answer.error,
      (Error{ErrorCode::kWrite, 0, std::nullopt, "the disk is full", {}}));
  s.push(0, 1, [](Message& message) { message.snap = 1; });
  EXPECT_FALSE(s.begun()[0]->in_snapshot);
}

TEST(ServerSnapshotTest, CapturesOfOlderSnapshotsEndWithTheNext) {
  ServerScript s(ServerScript::config(kSync, 1));
  s.control(0, Kind::kSnapshot, [](Message& message) { // and no snapshot 1
    message.snap = 2;
    message.counts = pushes_of_k(0);
  });
  ASSERT_EQ(s.all<WriteShard>().size(), 1);
  EXPECT_EQ(s.all<WriteShard>()[0]->shard.number, 2);
  s.server.on_written(2, std::nullopt, s.now);
  s.collect();
  s.push(0, 1, [](Message& message) { message.snap = 2; });
  EXPECT_FALSE(s.begun()[0]->in_snapshot);
}

TEST(ServerSnapshotTest, CapturesOfASnapshotThatIsAskedForStay) {
  ServerScript s(ServerScript::config(kSync, 1));
  s.control(0, Kind::kSnapshot, [](Message& message) {
    message.snap = 1;
    message.counts = {{ServerScript::slice(), 0}, {{"z", 0}, 0}};
  });
  s.control(0, Kind::kSnapshot, [](Message& message) {
    message.snap = 2;
    message.counts = pushes_of_k(0);
  });
  s.server.on_written(2, std::nullopt, s.now);
  s.collect();
  s.push(0, 1, [](Message& message) { message.snap = 2; });
  EXPECT_TRUE(s.begun()[0]->in_snapshot); // of 1, which waits for z
}

TEST(ServerSnapshotTest, UpdatesDoNotWaitForSnapshots) {
  for (const bool leases : {false, true}) {
    Config config = ServerScript::config(kSync, 1);
    config.leases = leases;
    ServerScript s(config);
    for (const int64_t number : {1, 2, 3}) {
      s.control(0, Kind::kSnapshot, [&](Message& message) {
        message.snap = number;
        message.counts = {{ServerScript::slice(), number - 1}, {{"z", 0}, 1}};
      });
      s.push(0, number, [&](Message& message) { message.snap = number; });
      ASSERT_EQ(s.begun().size(), static_cast<size_t>(number));
      s.apply_all();
    }
    Message init = s.operation(0, Kind::kInit, {"z", 0});
    s.send_parts(init, {0, 0, 0, 0}); // and z gets into all three
    s.control(0, Kind::kSnapshot, [](Message& message) { message.snap = 4; });
    const Message push = s.operation(0, Kind::kPush, {"z", 0}, [](Message& m) {
      m.round = 1;
      m.snap = 4;
    });
    s.send_parts(push, {1, 1, 1, 1});
    ASSERT_EQ(s.all<WriteShard>().size(), 4);
    for (const auto* written : s.all<WriteShard>()) {
      const Shard& shard = written->shard;
      if (shard.number == 4) {
        EXPECT_TRUE(shard.slices.empty());
        continue;
      }
      const int64_t n = shard.number - 1;
      const auto& shot = *shard.slices[0].second;
      EXPECT_EQ(shot.version, n);
      EXPECT_EQ(ServerScript::join(shot.value->pieces), (Values{n, n, n, n}))
          << "leases " << leases;
    }
  }
}

TEST(ServerSnapshotTest, ARestoredServerGoesOn) {
  ServerScript s(ServerScript::config(kSync, 2));
  for (const int32_t rank : {0, 1}) {
    s.push(rank, 1);
  }
  s.apply_all();
  s.control(0, Kind::kSnapshot, [](Message& message) {
    message.snap = 1;
    message.counts = pushes_of_k(1);
  });
  const Shard shard = s.all<WriteShard>().at(0)->shard;
  ServerScript next(ServerScript::config(kSync, 2), &shard);
  const Message done = next.last(1, Kind::kDone);
  EXPECT_EQ(done.round, 1); // goes on from there
  EXPECT_EQ(done.version, 1);
  EXPECT_EQ(done.kid, 1);
  EXPECT_EQ(next.last(0, Kind::kWelcome).snap, 1);
  EXPECT_EQ(next.stored(), (Values{2, 2, 2, 2}));
  for (const int32_t rank : {0, 1}) {
    next.push(rank, 2);
  }
  next.apply_all();
  EXPECT_EQ(next.view()->version, 2);
  EXPECT_EQ(next.stored(), (Values{4, 4, 4, 4}));
}

} // namespace
} // namespace torchkv::dist

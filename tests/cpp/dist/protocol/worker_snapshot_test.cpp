// Worker: rank 0's snapshots.
#include <gtest/gtest.h>

#include "dist/protocol/worker.h"
#include "worker_scene.h"

namespace torchkv::dist {
namespace {

using Lines = std::vector<std::string>;
using RK = Request::Kind;

TEST(WorkerSnapshotTest, ASnapshotEndsWhenItsManifestIsWritten) {
  WorkerScene scene(test_config(2, std::nullopt), 0);
  scene.start();
  scene.init({"w"});
  Request save = request(RK::kSnapshot);
  save.step = 12;
  const CallId id = scene.call(save);
  EXPECT_EQ(scene.sent.at(0).step, 12);
  EXPECT_EQ(scene.sent.at(0).snap, 1);
  EXPECT_EQ(scene.log(), (Lines{"SNAPSHOT 2", "SNAPSHOT 3"}));
  scene.done(2, 0);
  EXPECT_TRUE(scene.others.empty());
  scene.done(3, 1);
  ASSERT_EQ(scene.others.size(), 1);
  const auto& manifest = std::get<WriteManifest>(scene.others[0]).manifest;
  EXPECT_EQ(manifest.number, 1);
  EXPECT_EQ(manifest.job, kJob);
  EXPECT_EQ(manifest.step, 12);
  ASSERT_EQ(manifest.keys.size(), 1);
  EXPECT_EQ(manifest.keys[0].first, Key("w"));
  EXPECT_EQ(manifest.keys[0].second, floats(2));
  scene.worker.on_written(2, std::nullopt, scene.now);
  scene.collect();
  EXPECT_FALSE(scene.has_ended(id));
  scene.worker.on_written(1, std::nullopt, scene.now);
  scene.collect();
  EXPECT_FALSE(scene.ended(id).error);
}

TEST(WorkerSnapshotTest, AManifestHasTheKeysOfItsShards) {
  WorkerScene scene(test_config(1, std::nullopt), 0);
  scene.start();
  scene.init({"v", "w"});
  scene.call(request(RK::kDelete, {"v"}));
  scene.call(request(RK::kSnapshot));
  ASSERT_EQ(scene.sent.back().counts.size(), 1);
  EXPECT_EQ(scene.sent.back().counts[0].first.key, Key("w"));
  // The server keeps what the shard needs.
  scene.call(request(RK::kDelete, {"w"}));
  scene.done(5);
  scene.done(4);
  ASSERT_EQ(scene.others.size(), 1);
  const auto& manifest = std::get<WriteManifest>(scene.others[0]).manifest;
  ASSERT_EQ(manifest.keys.size(), 1);
  EXPECT_EQ(manifest.keys[0].first, Key("w"));
}

TEST(WorkerSnapshotTest, ASnapshotThatIsNotWrittenFailsAlone) {
  WorkerScene scene(test_config(2, std::nullopt), 0);
  scene.start();
  scene.init({"w"});
  CallId id = scene.call(request(RK::kSnapshot));
  scene.give({scene.error(1, 3, ErrorCode::kWrite)});
  EXPECT_EQ(scene.ended(id).error->code, ErrorCode::kWrite);
  EXPECT_FALSE(scene.worker.fatal());
  scene.done(2, 0);
  EXPECT_TRUE(scene.others.empty()); // no manifest
  id = scene.call(request(RK::kSnapshot)); // the next one counts
  scene.done(4, 0);
  scene.done(5, 1);
  scene.worker.on_written(2, "the disk is full", scene.now);
  scene.collect();
  const Error error{ErrorCode::kWrite, 0, std::nullopt, "the disk is full", {}};
  EXPECT_EQ(scene.ended(id).error, error);
  EXPECT_FALSE(scene.worker.fatal());
}

} // namespace
} // namespace torchkv::dist

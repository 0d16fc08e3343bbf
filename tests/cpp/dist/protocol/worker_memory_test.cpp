// Worker: pushes from regions of shared memory, pulls by leases.
#include <gtest/gtest.h>

#include <set>

#include "dist/protocol/worker.h"
#include "worker_scene.h"

namespace torchkv::dist {
namespace {

using Lines = std::vector<std::string>;
using RK = Request::Kind;

// Numbers regions by segment, and knows which live.
struct Memory {
  AllocateRegion allocate() {
    return [this](int32_t, size_t size) -> RegionPtr {
      const uint64_t segment = ++count;
      if (segment > most) {
        return nullptr;
      }
      live.insert(segment);
      return {new Region{segment, 0, size}, [this](const Region* region) {
                live.erase(region->segment);
                delete region;
              }};
    };
  }
  uint64_t count = 0;
  uint64_t most = 1000;
  std::set<uint64_t> live;
};

Config region_config(std::optional<int32_t> quorum) {
  Config config = test_config(1, quorum);
  config.push_regions = true;
  return config;
}

TEST(WorkerMemoryTest, APushIsCopiedIntoItsRegionBeforeItsNameLeaves) {
  Memory memory;
  WorkerScene scene(region_config(std::nullopt), 1, memory.allocate());
  scene.start();
  scene.init({"w"}, 8);
  Request push = request(RK::kPush, {"w"}, 8);
  push.items[0].value = bytes(32, 9);
  scene.worker.call(push, scene.now, 10);
  const Actions actions = scene.worker.take();
  ASSERT_EQ(actions.size(), 2);
  const auto& copy = std::get<CopyIn>(actions[0]);
  EXPECT_EQ(copy.region, (Region{1, 0, 32}));
  EXPECT_EQ(copy.bytes.data(), push.items[0].value.data());
  EXPECT_EQ(copy.bytes.size(), 32);
  const Frame& frame = std::get<Send>(actions[1]).frame;
  ASSERT_EQ(frame.size(), 1);
  EXPECT_EQ(frame[0].region, copy.region);
  EXPECT_EQ(frame[0].pieces, 1);
  EXPECT_EQ(frame[0].payload.size(), 0);
  // A retry names the same; a question names none.
  scene.run(2);
  ASSERT_EQ(scene.log(), Lines{"PUSH 2.0"});
  scene.got(2, {0});
  scene.run(1);
  ASSERT_FALSE(scene.sent.empty());
  EXPECT_EQ(scene.sent.back().region, std::nullopt);
}

TEST(WorkerMemoryTest, ARegionIsUsedAgainAfterItsOperationNotItsCall) {
  Memory memory;
  WorkerScene scene(region_config(std::nullopt), 1, memory.allocate());
  scene.start();
  scene.init({"w"});
  const auto push = [&](Time timeout) {
    scene.clear();
    scene.call(request(RK::kPush, {"w"}), timeout);
    for (const auto& action : scene.others) {
      return std::get<CopyIn>(action).region.segment;
    }
    return uint64_t{0};
  };
  EXPECT_EQ(push(1), 1);
  scene.run(2); // the call has timed out
  EXPECT_EQ(push(100), 2);
  EXPECT_EQ(push(100), 3); // not stalled: in dist_sync others wait for us
  scene.done(3);
  scene.done(2);
  EXPECT_EQ(push(100), 2);
  EXPECT_EQ(push(100), 1);
  EXPECT_EQ(memory.live, (std::set<uint64_t>{1, 2, 3}));
  for (int64_t opno = 4; opno <= 6; ++opno) {
    scene.done(opno);
  }
  scene.call(request(RK::kDelete, {"w"}));
  EXPECT_EQ(memory.live.size(), 3);
  scene.done(7);
  EXPECT_TRUE(memory.live.empty());
}

TEST(WorkerMemoryTest, TheThirdPushOfDistAsyncWaitsAndLeavesNoTrace) {
  Memory memory;
  WorkerScene scene(region_config(1), 1, memory.allocate());
  scene.start();
  scene.init({"w"});
  scene.call(request(RK::kPush, {"w"}));
  scene.call(request(RK::kPush, {"w"}));
  EXPECT_EQ(scene.worker.stalled(), 0);
  scene.clear();
  const CallId late = scene.call(request(RK::kPush, {"w"}), 2);
  EXPECT_EQ(scene.worker.stalled(), late);
  EXPECT_EQ(scene.log(), Lines{});
  Message wait = scene.from(0, Kind::kWait, 2);
  wait.missing = {3};
  scene.give(wait);
  scene.run(2);
  const Return end = scene.ended(late);
  EXPECT_EQ(error_in(end).code, ErrorCode::kTimeout);
  EXPECT_EQ(error_in(end).missing, std::vector<int32_t>{3});
  EXPECT_EQ(scene.worker.stalled(), 0);
  const CallId next = scene.call(request(RK::kPush, {"w"}), 100);
  EXPECT_EQ(scene.worker.stalled(), next);
  scene.clear();
  scene.done(2);
  EXPECT_EQ(scene.worker.stalled(), 0);
  ASSERT_FALSE(scene.sent.empty());
  EXPECT_EQ(scene.sent.back().opno, 4);
  EXPECT_EQ(scene.sent.back().round, 3);
  scene.done(4);
  EXPECT_FALSE(scene.ended(next).error);
  EXPECT_EQ(memory.count, 2);
}

TEST(WorkerMemoryTest, AStalledPushThatIsRefusedEnds) {
  Memory memory;
  WorkerScene scene(region_config(1), 1, memory.allocate());
  scene.start();
  scene.init({"w"});
  for (int i = 0; i < 2; ++i) {
    scene.call(request(RK::kPush, {"w"}));
  }
  const CallId late = scene.call(request(RK::kPush, {"w"}));
  EXPECT_EQ(scene.worker.stalled(), late);
  scene.worker.on_peer_lost(0, scene.now);
  scene.collect();
  EXPECT_EQ(error_in(scene.ended(late)).code, ErrorCode::kServerLost);
  EXPECT_EQ(scene.worker.stalled(), 0);
  // Who seems lost may still be reading.
  EXPECT_EQ(memory.live.size(), 2);
}

TEST(WorkerMemoryTest, WithoutMemoryThePushTravelsInPieces) {
  Memory memory;
  memory.most = 0;
  WorkerScene scene(region_config(1), 1, memory.allocate());
  scene.start();
  scene.init({"w"}, 8);
  scene.call(request(RK::kPush, {"w"}, 8));
  EXPECT_TRUE(scene.others.empty());
  EXPECT_EQ(scene.log(), (Lines{"PUSH 2.0", "PUSH 2.1"}));
}

struct LeaseScene : WorkerScene {
  LeaseScene() : WorkerScene(with_leases()) {
    start();
    init({"w"}, 8);
    id = call(request(RK::kPull, {"w"}));
    clear();
    lease = from(0, Kind::kValue, 2);
    lease.region = Region{4, 64, 32};
    lease.kid = 1;
    lease.version = 6;
  }
  static Config with_leases() {
    Config config = test_config(1, 1);
    config.leases = true;
    return config;
  }
  void copied(int64_t version) {
    worker.on_copied(2, bytes(32), 1, version, now);
    collect();
  }
  CallId id;
  Message lease;
};

TEST(WorkerMemoryTest, ALeaseIsCopiedOnceAndFreedUntilTheServerKnows) {
  LeaseScene scene;
  scene.give(Frame{scene.lease, scene.lease});
  ASSERT_EQ(scene.others.size(), 1);
  const auto& copy = std::get<CopyOut>(scene.others[0]);
  EXPECT_EQ(copy.opno, 2);
  EXPECT_EQ(copy.region, scene.lease.region);
  EXPECT_EQ(scene.log(), Lines{});
  scene.copied(6);
  const Return end = scene.ended(scene.id);
  ASSERT_EQ(end.results.size(), 1);
  EXPECT_EQ(end.results[0].version, 6);
  EXPECT_EQ(end.results[0].pieces.at(0).size(), 32);
  ASSERT_EQ(scene.sent.size(), 1);
  EXPECT_EQ(scene.sent[0].opnos, std::vector<int64_t>{2});
  EXPECT_EQ(scene.log(), Lines{"FREE"});
  scene.run(1);
  EXPECT_EQ(scene.log(), Lines{"FREE"});
  Message freed = scene.from(0, Kind::kFreed);
  freed.opnos = {2};
  scene.give(freed);
  scene.run(2);
  EXPECT_EQ(scene.log(), Lines{});
}

TEST(WorkerMemoryTest, ATornCopyIsThrownAwayAndAskedForAgain) {
  LeaseScene scene;
  scene.give(scene.lease);
  scene.copied(7);
  EXPECT_FALSE(scene.has_ended(scene.id));
  scene.copied(6); // of no lease
  EXPECT_FALSE(scene.has_ended(scene.id));
  scene.clear();
  scene.run(1);
  EXPECT_EQ(scene.log(), Lines{"PULL 2"});
  scene.lease.version = 7;
  scene.give(scene.lease);
  scene.copied(7);
  EXPECT_EQ(scene.ended(scene.id).results.at(0).version, 7);
}

TEST(WorkerMemoryTest, ALeaseOfAnotherSizeIsDropped) {
  LeaseScene scene;
  scene.lease.region = Region{4, 64, 31};
  scene.give(scene.lease);
  EXPECT_TRUE(scene.others.empty());
}

} // namespace
} // namespace torchkv::dist

// Worker: deletes, which wait for the other calls on their keys.
#include <gtest/gtest.h>

#include <algorithm>

#include "dist/protocol/worker.h"
#include "worker_scene.h"

namespace torchkv::dist {
namespace {

using Lines = std::vector<std::string>;
using RK = Request::Kind;

TEST(WorkerDeleteTest, ADeletedKeyIsUnknown) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"w", "x"});
  const CallId id = scene.call(request(RK::kDelete, {"w", "x"}));
  EXPECT_EQ(scene.log(), (Lines{"DELETE 3", "DELETE 4"}));
  scene.done(3);
  EXPECT_FALSE(scene.has_ended(id));
  scene.done(4);
  EXPECT_FALSE(scene.ended(id).error);
  const Return end = scene.ended(scene.call(request(RK::kPull, {"x"})));
  ASSERT_TRUE(end.error);
  EXPECT_EQ(error_in(end).code, ErrorCode::kUnknown);
  EXPECT_EQ(error_in(end).who, 1);
  EXPECT_EQ(error_in(end).slice, (SliceId{"x", 0}));
}

TEST(WorkerDeleteTest, ADeleteWaitsForCallsOnItsKeys) {
  WorkerScene scene(test_config(1, 1));
  scene.start();
  scene.init({"w", "x", "y"});
  const CallId pull = scene.call(request(RK::kPull, {"w"}));
  scene.call(request(RK::kPull, {"y"}));
  const CallId push = scene.call(request(RK::kPush, {"x"}));
  EXPECT_EQ(scene.log(), (Lines{"PULL 4", "PULL 5", "PUSH 6.0"}));
  const CallId id = scene.call(request(RK::kDelete, {"w", "x"}));
  scene.give(scene.value(0, 4, bytes(8)));
  EXPECT_FALSE(scene.ended(pull).error);
  EXPECT_EQ(scene.log(), Lines{"GOT"}); // the push is still under way
  scene.done(6);
  EXPECT_FALSE(scene.ended(push).error);
  EXPECT_EQ(scene.log(), (Lines{"DELETE 7", "DELETE 8"}));
  scene.done(7);
  scene.done(8);
  EXPECT_FALSE(scene.ended(id).error);
}

TEST(WorkerDeleteTest, ADeleteDoesNotWaitForCallsThatHaveTimedOut) {
  WorkerScene scene(test_config(1, 1));
  scene.start();
  scene.init({"w"});
  const CallId pull = scene.call(request(RK::kPull, {"w"}), 2);
  scene.call(request(RK::kDelete, {"w"}), 100);
  EXPECT_EQ(scene.log(), Lines{"PULL 2"});
  scene.run(3);
  EXPECT_EQ(error_in(scene.ended(pull)).code, ErrorCode::kTimeout);
  const Lines lines = scene.log();
  EXPECT_NE(std::find(lines.begin(), lines.end(), "DELETE 3"), lines.end());
}

TEST(WorkerDeleteTest, ADeleteIsDoneAfterItsCallHasTimedOut) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"w"});
  const CallId id = scene.call(request(RK::kDelete, {"w"}), 2);
  scene.run(3);
  const Return end = scene.ended(id);
  EXPECT_EQ(error_in(end).code, ErrorCode::kTimeout);
  EXPECT_TRUE(end.begun);
  const auto is_unknown = [&](RK kind) {
    const Return call = scene.ended(scene.call(request(kind, {"w"})));
    return error_in(call).code == ErrorCode::kUnknown;
  };
  EXPECT_TRUE(is_unknown(RK::kPull));
  EXPECT_TRUE(is_unknown(RK::kDelete));
  scene.call(request(RK::kBarrier, {}));
  EXPECT_TRUE(scene.sent.back().counts.empty());
  scene.done(2);
  EXPECT_TRUE(is_unknown(RK::kPush));
}

TEST(WorkerDeleteTest, AKeyIsInitializedWhileItsDeleteIsUnderWay) {
  WorkerScene scene(test_config(1, std::nullopt));
  scene.start();
  scene.init({"w"});
  scene.call(request(RK::kDelete, {"w"}), 2);
  scene.run(3);
  const CallId init = scene.call(request(RK::kInit, {"w"}));
  EXPECT_EQ(scene.sent.back().prev, 2); // the stream goes on
  scene.done(2);
  EXPECT_FALSE(scene.has_ended(init));
  scene.done(3);
  EXPECT_FALSE(scene.ended(init).error);
  scene.call(request(RK::kPull, {"w"}));
  EXPECT_EQ(scene.sent.back().kind, Kind::kPull);
}

TEST(WorkerDeleteTest, OnlyADeleteThatIsHeldIsWithdrawn) {
  WorkerScene scene(test_config(1, 1));
  scene.start();
  scene.init({"w"});
  const CallId pull = scene.call(request(RK::kPull, {"w"}));
  const CallId held = scene.call(request(RK::kDelete, {"w"}));
  scene.worker.withdraw(held, scene.now);
  scene.collect();
  const Return withdrawn = scene.ended(held);
  EXPECT_EQ(error_in(withdrawn).code, ErrorCode::kTimeout);
  EXPECT_FALSE(withdrawn.begun);
  scene.give(scene.value(0, 2, bytes(8)));
  EXPECT_FALSE(scene.ended(pull).error); // and the delete is not sent
  const CallId sent = scene.call(request(RK::kDelete, {"w"}));
  EXPECT_EQ(scene.sent.back().kind, Kind::kDelete);
  scene.worker.withdraw(sent, scene.now);
  scene.collect();
  EXPECT_FALSE(scene.has_ended(sent));
}

TEST(WorkerDeleteTest, AHeldDeleteThatTimesOutNamesWhomTheOthersWaitFor) {
  WorkerScene scene(test_config(1, 1));
  scene.start();
  scene.init({"v", "w"});
  scene.call(request(RK::kPull, {"v"}));
  scene.call(request(RK::kPull, {"w"}));
  const CallId id = scene.call(request(RK::kDelete, {"w"}), 2);
  for (const auto& [opno, rank] : {std::pair{3, 2}, {4, 3}}) {
    Message wait = scene.from(0, Kind::kWait, opno);
    wait.missing = {rank};
    scene.give(wait);
  }
  scene.run(3);
  const Error error = error_in(scene.ended(id));
  EXPECT_EQ(error.code, ErrorCode::kTimeout);
  EXPECT_EQ(error.missing, std::vector<int32_t>{3});
  EXPECT_EQ(error.slice, (SliceId{"w", 0}));
}

TEST(WorkerDeleteTest, AHeldDeleteFailsWithItsServer) {
  WorkerScene scene(test_config(1, 1));
  scene.start();
  scene.init({"w"});
  scene.call(request(RK::kPull, {"w"}));
  const CallId id = scene.call(request(RK::kDelete, {"w"}));
  scene.worker.on_peer_lost(0, scene.now);
  scene.collect();
  EXPECT_EQ(error_in(scene.ended(id)).code, ErrorCode::kServerLost);
  EXPECT_EQ(scene.worker.num_operations(), 0);
}

} // namespace
} // namespace torchkv::dist

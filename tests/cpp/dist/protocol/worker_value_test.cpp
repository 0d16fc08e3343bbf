// Worker: what each slice's message has of a pushed value.
#include <gtest/gtest.h>

#include <map>

#include "dist/protocol/worker.h"
#include "worker_scene.h"

namespace torchkv::dist {
namespace {

using RK = Request::Kind;

TEST(WorkerValueTest, CodesOfAPushAreOneForEachSlice) {
  Config config = test_config(2, std::nullopt);
  config.split_bytes = 64;
  WorkerScene scene(config);
  scene.start();
  scene.init({"w"}, 40);
  Request push = request(RK::kPush, {"w"}, 40);
  push.items[0].value = Blob();
  push.items[0].codes = {bytes(7), bytes(300)};
  scene.call(push);
  std::map<int32_t, size_t> sizes;
  for (const auto& message : scene.sent) {
    EXPECT_TRUE(message.is_encoded);
    sizes[message.slice.index] += message.payload.size();
  }
  EXPECT_EQ(sizes, (std::map<int32_t, size_t>{{0, 7}, {1, 300}}));
  push.items[0].codes.pop_back();
  const auto refused = scene.ended(scene.call(push)).error;
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, ErrorCode::kShape);
}

// A pull that asks for a part of each slice.
TEST(WorkerValueTest, QueriesAreOneForEachSlice) {
  Config config = test_config(2, std::nullopt);
  config.split_bytes = 64;
  config.leases = true;
  WorkerScene scene(config);
  scene.start();
  scene.init({"w"}, 40);
  Request pull(RK::kPull);
  pull.items.resize(1);
  pull.items[0].key = "w";
  pull.items[0].queries = {{bytes(7), 12}, {bytes(40), 0}};
  const CallId call = scene.call(pull);
  std::map<int32_t, size_t> sizes;
  std::map<int32_t, Message> first;
  for (const auto& message : scene.take_sent()) {
    EXPECT_EQ(message.kind, Kind::kPull);
    EXPECT_EQ(message.pieces, message.slice.index == 0 ? 1 : 3);
    sizes[message.slice.index] += message.payload.size();
    first.emplace(message.slice.index, message);
  }
  EXPECT_EQ(sizes, (std::map<int32_t, size_t>{{0, 7}, {1, 40}}));
  // Only what has the size of the answer is one.
  const auto answer = [&](int32_t index, const Blob& payload) {
    const Message& asked = first.at(index);
    scene.give(scene.value(asked.header.server, asked.opno, payload));
  };
  answer(0, bytes(80));
  Message lease =
      scene.value(first.at(0).header.server, first.at(0).opno, Blob());
  lease.region = Region{1, 0, 12};
  lease.index = -1;
  scene.give(lease);
  answer(1, bytes(1));
  answer(0, bytes(12, 5));
  EXPECT_FALSE(scene.has_ended(call));
  answer(1, Blob());
  const Return& end = scene.ended(call);
  EXPECT_FALSE(end.error);
  ASSERT_EQ(end.results.size(), 2);
  EXPECT_EQ(end.results[0].pieces[0].size(), 12);
  EXPECT_EQ(end.results[1].pieces[0].size(), 0);
  pull.items[0].queries.pop_back();
  const auto refused = scene.ended(scene.call(pull)).error;
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, ErrorCode::kShape);
}

TEST(WorkerValueTest, APushInAnotherTypeIsCutByItsOwnSize) {
  Config config = test_config(2, std::nullopt);
  config.split_bytes = 64;
  WorkerScene scene(config);
  scene.start();
  scene.init({"w"}, 40);
  Request push = request(RK::kPush, {"w"}, 40);
  push.items[0].value = bytes(80);
  push.items[0].item_bytes = 2;
  push.items[0].dtype = 5;
  scene.call(push);
  size_t total = 0;
  for (const auto& message : scene.sent) {
    total += message.payload.size();
    EXPECT_EQ(message.item_bytes, 2);
    EXPECT_EQ(message.dtype, 5);
    EXPECT_EQ(message.total, 40);
  }
  EXPECT_EQ(total, 80);
}

} // namespace
} // namespace torchkv::dist

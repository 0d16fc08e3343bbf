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

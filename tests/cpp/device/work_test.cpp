#include "device/work.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "recording_runtime.h"

namespace torchkv {
namespace {

using Log = std::vector<std::string>;

c10::Stream stream_on(int device, int64_t id) {
  return c10::Stream(
      c10::Stream::UNSAFE,
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)),
      id);
}

Work::Part part_on(int device, bool is_captured = false) {
  return {
      stream_on(device, 1),
      stream_on(device, 100),
      std::make_shared<RuntimeEvent>(),
      is_captured};
}

TEST(WorkTest, EmptyWorkIsCompleted) {
  testing::RecordingRuntime runtime;
  Work work(runtime, {}, {});
  EXPECT_TRUE(work.is_completed());
  EXPECT_EQ(work.repr(), "Work(is_completed=True)");
  work.wait();
  EXPECT_EQ(runtime.log, Log{});
}

TEST(WorkTest, WaitsOnTheCurrentStreamOfEachDevice) {
  testing::RecordingRuntime runtime;
  Work work(runtime, {part_on(0), part_on(2)}, {});
  runtime.stream = 7;
  work.wait();
  EXPECT_EQ(runtime.log, (Log{"wait 7", "wait 7 of 2"}));
  runtime.stream = 8;
  work.wait();
  EXPECT_EQ(
      runtime.log, (Log{"wait 7", "wait 7 of 2", "wait 8", "wait 8 of 2"}));
}

TEST(WorkTest, IsCompletedWithItsEvents) {
  testing::RecordingRuntime runtime;
  const Work work(runtime, {part_on(0)}, {});
  EXPECT_FALSE(work.is_completed());
  EXPECT_EQ(work.repr(), "Work(is_completed=False)");
  runtime.done = true;
  EXPECT_TRUE(work.is_completed());
}

// Its event cannot be queried.
TEST(WorkTest, CapturedWorkIsNeverCompleted) {
  testing::RecordingRuntime runtime;
  const Work work(runtime, {part_on(0), part_on(1, true)}, {});
  runtime.done = true;
  EXPECT_FALSE(work.is_completed());
}

} // namespace
} // namespace torchkv

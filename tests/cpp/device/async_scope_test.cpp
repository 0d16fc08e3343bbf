#include "device/async_scope.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "recording_runtime.h"

namespace torchkv {
namespace {

using Log = std::vector<std::string>;

// The runtime's own streams are from 100.
class AsyncScopeTest : public ::testing::Test {
 protected:
  testing::RecordingRuntime runtime_;
  Streams streams_{runtime_};
  const c10::Device device_{c10::kCUDA, 0};
};

TEST_F(AsyncScopeTest, DoesNothingOnTheCpu) {
  AsyncScope scope(streams_);
  scope.enter(at::zeros(3));
  scope.enter(c10::kCPU);
  EXPECT_TRUE(scope.finish()->is_completed());
  EXPECT_EQ(runtime_.log, Log{});
}

TEST_F(AsyncScopeTest, RunsAfterTheCallersStreamOnAStreamOfTheStore) {
  runtime_.stream = 1;
  for (int i = 0; i < 2; ++i) {
    runtime_.log.clear();
    AsyncScope scope(streams_);
    scope.enter(device_);
    EXPECT_EQ(runtime_.stream, 100);
    EXPECT_EQ(runtime_.log, (Log{"record 1", "wait 100"}));
    const WorkPtr work = scope.finish();
    EXPECT_EQ(runtime_.stream, 1);
    EXPECT_EQ(runtime_.log, (Log{"record 1", "wait 100", "record 100"}));
  }
  EXPECT_EQ(runtime_.num_streams, 1);
  EXPECT_EQ(runtime_.num_events, 1); // the first one, reused
}

TEST_F(AsyncScopeTest, EachStoreHasAStreamOnEachDevice) {
  Streams others(runtime_);
  const c10::Device second(c10::kCUDA, 1);
  EXPECT_EQ(streams_.of(Place{device_}).id(), 100);
  EXPECT_EQ(streams_.of(Place{second}).id(), 101);
  EXPECT_EQ(others.of(Place{second}).id(), 102);
  EXPECT_EQ(streams_.of(Place{device_}).id(), 100);
}

TEST_F(AsyncScopeTest, WithoutFinishTheCallerWaits) {
  runtime_.stream = 1;
  {
    AsyncScope scope(streams_);
    scope.enter(device_);
  }
  EXPECT_EQ(runtime_.stream, 1);
  EXPECT_EQ(
      runtime_.log, (Log{"record 1", "wait 100", "record 100", "wait 1"}));
}

TEST_F(AsyncScopeTest, WorkInAGraphIsNeverCompleted) {
  runtime_.capturing = true;
  runtime_.done = true;
  AsyncScope scope(streams_);
  scope.enter(device_);
  EXPECT_FALSE(scope.finish()->is_completed());
}

} // namespace
} // namespace torchkv

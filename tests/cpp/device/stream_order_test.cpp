// StreamOrder: orders work of several streams on one slice, and nothing else.
#include "device/stream_order.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "memory/entry.h"
#include "recording_runtime.h"

namespace torchkv {
namespace {

using Log = std::vector<std::string>;

// A device that every build of PyTorch can set as current.
const c10::Device kHome(c10::kMeta);

class StreamOrderTest : public ::testing::Test {
 protected:
  static Slice slice_on(c10::Device home) {
    Slice slice;
    slice.home.device = home;
    slice.value = at::ones(1);
    return slice;
  }

  // A call that works on the slices; returns what it did.
  Log call(std::vector<Slice*> slices) {
    runtime_.log.clear();
    {
      StreamOrder order(streams_);
      for (auto* slice : slices) {
        slice->enter(order);
      }
    }
    return runtime_.log;
  }

  // Enters every slice and uses it with tensors on all homes.
  static void use_all(StreamOrder& order, std::vector<Slice>& slices) {
    for (auto& slice : slices) {
      slice.enter(order);
      for (const auto& other : slices) {
        order.use(slice.home, other.home.device);
      }
    }
    order.sync();
  }

  testing::RecordingRuntime runtime_;
  Streams streams_{runtime_};
};

TEST_F(StreamOrderTest, DoesNothingOnTheCpu) {
  Slice slice = slice_on(c10::kCPU);
  EXPECT_EQ(call({&slice}), Log());
  runtime_.stream = 7;
  EXPECT_EQ(call({&slice}), Log());
}

TEST_F(StreamOrderTest, OneStreamNeverWaits) {
  Slice slice = slice_on(kHome);
  EXPECT_EQ(call({&slice}), Log{"record 0"});
  EXPECT_EQ(call({&slice}), Log{"record 0"});
}

TEST_F(StreamOrderTest, AnotherStreamWaitsForTheLastAndKeepsTheMemory) {
  Slice slice = slice_on(kHome);
  call({&slice});
  runtime_.stream = 7;
  EXPECT_EQ(call({&slice}), (Log{"wait 7", "keep 7", "record 7"}));
  EXPECT_EQ(call({&slice}), Log{"record 7"});
}

TEST_F(StreamOrderTest, ManyKeysOfACallHaveOneEvent) {
  std::vector<Slice> slices;
  std::vector<Slice*> all;
  for (int i = 0; i < 50; ++i) {
    slices.push_back(slice_on(kHome));
  }
  for (auto& slice : slices) {
    all.push_back(&slice);
  }
  EXPECT_EQ(call(all), Log{"record 0"});
  EXPECT_EQ(call(all), Log{"record 0"});
  // Two: the keys hold one until the call has the next.
  EXPECT_EQ(runtime_.num_events, 2);
  for (int i = 0; i < 10; ++i) {
    call(all);
  }
  EXPECT_EQ(runtime_.num_events, 2) << "events are used again";
}

TEST_F(StreamOrderTest, ATensorOnAnotherDeviceIsOrderedBothWays) {
  Slice slice = slice_on(kHome);
  const c10::Device other(c10::kCUDA, 3);
  {
    StreamOrder order(streams_);
    slice.enter(order);
    order.use({kHome}, other);
    order.use({kHome}, other);
    order.use({kHome}, kHome);
    order.use({kHome}, c10::kCPU);
    EXPECT_EQ(runtime_.log, Log());
    order.sync();
    order.use({kHome}, other);
    order.sync();
    EXPECT_EQ(runtime_.log, (Log{"record 0 of 3", "wait 0"}));
  }
  EXPECT_EQ(
      runtime_.log,
      (Log{"record 0 of 3", "wait 0", "record 0", "wait 0 of 3"}));
}

// Several homes and callers: all events are recorded before any is waited for,
// and one of the streams waits for the others before they wait for it.
TEST_F(StreamOrderTest, ManyHomesWaitThroughAHub) {
  std::vector<Slice> slices;
  for (int d = 0; d < 3; ++d) {
    slices.push_back(
        slice_on(c10::Device(c10::kMeta, static_cast<c10::DeviceIndex>(d))));
  }
  {
    StreamOrder order(streams_);
    use_all(order, slices);
    EXPECT_EQ(
        runtime_.log,
        (
            Log{"record 0 of 1",
                "record 0 of 2",
                "record 0",
                "wait 0",
                "wait 0",
                "record 0",
                "wait 0 of 1",
                "wait 0 of 2"}));
    runtime_.log.clear();
  }
  EXPECT_EQ(
      runtime_.log,
      (
          Log{"record 0",
              "record 0 of 1",
              "record 0 of 2",
              "wait 0 of 1",
              "wait 0 of 1",
              "record 0 of 1",
              "wait 0 of 2",
              "wait 0"}));
}

// A few waits are made directly.
TEST_F(StreamOrderTest, TwoHomesWaitDirectly) {
  std::vector<Slice> slices{slice_on(kHome), slice_on({c10::kMeta, 1})};
  StreamOrder order(streams_);
  use_all(order, slices);
  EXPECT_EQ(
      runtime_.log,
      (Log{"record 0 of 1", "record 0", "wait 0", "wait 0 of 1"}));
}

TEST_F(StreamOrderTest, ACaptureWaitsForNothingOutside) {
  Slice slice = slice_on(kHome);
  call({&slice});
  runtime_.stream = 7;
  runtime_.capturing = true;
  EXPECT_EQ(call({&slice}), Log());
  runtime_.capturing = false;
  runtime_.stream = 0;
  EXPECT_EQ(call({&slice}), Log{"record 0"});
}

} // namespace
} // namespace torchkv

#include "dist/caller_values.h"

#include <ATen/ops/full.h>
#include <c10/util/ArrayRef.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace torchkv::dist {
namespace {

// A round of pushes of these pieces.
RoundPtr round_of(c10::ArrayRef<Blob> pieces) {
  auto round = std::make_shared<Round>();
  round->pushes.resize(2);
  round->pushes[0].pieces = {blob_of(at::full({2}, 9.0F))};
  round->pushes[1].pieces = pieces;
  return round;
}

at::Tensor read(const RoundPtr& round) {
  return tensor_of(
      round->pushes[1].pieces, {4}, c10::ScalarType::Float, Buffers());
}

TEST(CallerValuesTest, AValueIsReadWhereItIs) {
  const CallerValues callers;
  at::Tensor value = at::full({4}, 1.0F);
  RoundPtr round;
  {
    CallerValues::OfCall of_call(callers, Buffers());
    const Blob blob = of_call.add(value);
    EXPECT_EQ(blob.data(), value.const_data_ptr());
    round = round_of(cut(blob, 8));
    const auto held = callers.hold(round);
    EXPECT_EQ(read(round).const_data_ptr(), value.const_data_ptr());
    of_call.set_merged();
  }
  value.fill_(2);
  const auto held = callers.hold(round);
  EXPECT_EQ(read(round).const_data_ptr(), value.const_data_ptr()); // no copy
}

TEST(CallerValuesTest, ACallerThatReturnsEarlyLeavesACopy) {
  const CallerValues callers;
  at::Tensor value = at::full({6}, 1.0F);
  RoundPtr round;
  {
    CallerValues::OfCall of_call(callers, Buffers());
    // All but the first two elements, in two pieces.
    round = round_of(cut(of_call.add(value).slice(8, 16), 8));
  }
  value.fill_(2);
  const auto held = callers.hold(round);
  EXPECT_TRUE(read(round).equal(at::full({4}, 1.0F)));
  EXPECT_EQ(static_cast<const float*>(read(round).const_data_ptr())[0], 1.0F);
}

TEST(CallerValuesTest, ACallerWaitsForAnUpdateThatReadsItsValues) {
  const CallerValues callers;
  const at::Tensor value = at::full({4}, 1.0F);
  auto of_call = std::make_unique<CallerValues::OfCall>(callers, Buffers());
  const RoundPtr round = round_of({of_call->add(value)});
  std::atomic<bool> has_returned = false;
  std::thread caller;
  {
    const auto held = callers.hold(round);
    caller = std::thread([&] {
      of_call.reset();
      has_returned = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(has_returned);
    EXPECT_EQ(read(round).const_data_ptr(), value.const_data_ptr());
  }
  caller.join();
  const auto held = callers.hold(round);
  EXPECT_NE(read(round).const_data_ptr(), value.const_data_ptr());
}

TEST(CallerValuesTest, BlobsDoNotKeepTheTensorOfACallThatHasEnded) {
  for (const bool are_merged : {false, true}) {
    auto callers = std::make_unique<CallerValues>();
    const at::Tensor value = at::full({4}, 1.0F);
    Blob blob;
    {
      CallerValues::OfCall of_call(*callers, Buffers());
      blob = of_call.add(value);
      EXPECT_EQ(value.use_count(), 2);
      if (are_merged) {
        of_call.set_merged();
      }
    }
    EXPECT_EQ(value.use_count(), 1);
    callers.reset(); // before the blob
  }
}

TEST(CallerValuesTest, TheOutOfACallThatWaitsIsWritten) {
  const CallerValues callers;
  const at::Tensor value = at::full({6}, 1.0F);
  const at::Tensor out = at::full({6}, 0.0F);
  const Blob result = blob_of(at::full({4}, 5.0F));
  CallerValues::OfCall of_call(callers, Buffers());
  // All but the first two elements, in two pieces.
  const RoundPtr round = round_of(cut(of_call.add(value, out).slice(8, 16), 8));
  const RoundPtr other = round_of({of_call.add(value)});
  {
    const auto held = callers.hold({round, other});
    const at::Tensor part = callers.out_of(*round, {2, 2}, c10::kFloat);
    EXPECT_EQ(part.sizes(), (c10::IntArrayRef{2, 2}));
    EXPECT_EQ(part.const_data_ptr(), out.const_data_ptr<float>() + 2);
    EXPECT_FALSE(callers.out_of(*other, {6}, c10::kFloat).defined());
    EXPECT_TRUE(of_call.in_outs().empty());
    callers.set_written(*round, result);
    callers.set_written(*other, blob_of(value));
  }
  of_call.set_merged();
  EXPECT_EQ(
      of_call.in_outs(), std::unordered_set<const void*>{result.owner().get()});
}

TEST(CallerValuesTest, TheOutOfACallThatHasEndedIsNotWritten) {
  const CallerValues callers;
  const at::Tensor value = at::full({4}, 1.0F);
  const at::Tensor out = at::full({4}, 0.0F);
  const Blob result = blob_of(at::full({4}, 5.0F));
  RoundPtr early;
  RoundPtr written;
  {
    CallerValues::OfCall of_call(callers, Buffers());
    early = round_of({of_call.add(value, out)});
    written = round_of({of_call.add(value, out)});
    const auto held = callers.hold({early, written});
    callers.set_written(*written, result);
    EXPECT_EQ(result.owner().use_count(), 2);
  }
  const auto held = callers.hold({early, written});
  for (const auto& round : {early, written}) {
    EXPECT_FALSE(callers.out_of(*round, {4}, c10::kFloat).defined());
  }
  EXPECT_EQ(out.use_count(), 1);
  EXPECT_EQ(result.owner().use_count(), 1);
}

TEST(CallerValuesTest, RoundsWithoutCallersValuesHoldNothing) {
  const CallerValues callers;
  const RoundPtr round = round_of({blob_of(at::full({4}, 1.0F))});
  EXPECT_FALSE(callers.hold(round).owns_lock());
}

} // namespace
} // namespace torchkv::dist

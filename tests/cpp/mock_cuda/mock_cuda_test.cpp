// Each rule of the checker: violated and detected, kept and passed.
#include "mock_cuda.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "devices_test.h"

namespace torchkv::mock_cuda {
namespace {

using MockCudaTest = DevicesTest;

void* handle(c10::Stream stream) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamNativeHandle(stream);
}

std::vector<Range> ranges_of(const at::Tensor& tensor, bool is_write) {
  return {{tensor.const_data_ptr(), tensor.nbytes(), is_write}};
}

// A kernel that touches one tensor, on the current stream of the current
// device.
void launch_on(
    const at::Tensor& tensor,
    bool is_write,
    const char* name = "kernel") {
  launch(
      name,
      handle(current_stream(current_device())),
      ranges_of(tensor, is_write),
      [] {});
}

// --- (a) Conflicting accesses are ordered
// ----------------------------------------

TEST_F(MockCudaTest, AConflictNamesBothAccesses) {
  const at::Tensor x = at::zeros(4, cuda(1));
  const c10::StreamGuard guard(new_stream(cuda(1)));
  EXPECT_EQ(
      refusal([&] { x.add_(1); }),
      "mock_cuda: aten::add on stream 1 of cuda:1 reads memory that aten::zero_ "
      "on stream 0 of cuda:1 writes, and nothing orders the two");
}

TEST_F(MockCudaTest, AWriteAfterAReadIsAConflict) {
  const at::Tensor x = at::zeros(4, cuda(0));
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), stream);
  launch_on(x, /*is_write=*/false, "read");
  const c10::StreamGuard guard(stream);
  EXPECT_NE(
      refusal([&] { x.fill_(1); }).find("read on stream 0 of cuda:0 reads"),
      std::string::npos);
}

TEST_F(MockCudaTest, EventsOrder) {
  const at::Tensor x = at::zeros(4, cuda(0));
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), stream);
  {
    const c10::StreamGuard guard(stream);
    x.add_(1);
  }
  order(stream, current_stream(cuda(0)));
  x.add_(1);
  EXPECT_EQ(x.sum().item<float>(), 8);
}

TEST_F(MockCudaTest, AnEventOrdersOnlyEarlierWork) {
  const at::Tensor x = at::zeros(4, cuda(0));
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), stream);
  x.add_(1);
  const c10::StreamGuard guard(stream);
  EXPECT_NE(refusal([&] { x.add_(1); }), "");
}

TEST_F(MockCudaTest, EventsOrderThroughAThirdStream) {
  const at::Tensor x = at::zeros(4, cuda(0));
  const c10::Stream third = new_stream(cuda(2));
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), third);
  order(third, stream);
  const c10::StreamGuard guard(stream);
  EXPECT_EQ(refusal([&] { x.add_(1); }), "");
  order(stream, c10::Stream(c10::Stream::DEFAULT, cuda(0)));
}

TEST_F(MockCudaTest, AHostThatWaitsOrders) {
  const at::Tensor x = at::zeros(4, cuda(0));
  const c10::Stream stream = new_stream(cuda(0));
  const c10::Stream before = current_stream(cuda(0));
  before.synchronize();
  const c10::StreamGuard guard(stream);
  EXPECT_EQ(refusal([&] { x.add_(1); }), "");
  stream.synchronize();
}

TEST_F(MockCudaTest, TwoReadsNeedNoOrder) {
  const at::Tensor x = at::zeros(4, cuda(0));
  current_stream(cuda(0)).synchronize();
  const c10::Stream stream = new_stream(cuda(0));
  launch_on(x, /*is_write=*/false);
  {
    const c10::StreamGuard guard(stream);
    EXPECT_EQ(refusal([&] { launch_on(x, /*is_write=*/false); }), "");
  }
  stream.synchronize();
}

TEST_F(MockCudaTest, ColumnsOfAMatrixDoNotConflict) {
  const at::Tensor x = at::zeros({4, 4}, cuda(0));
  current_stream(cuda(0)).synchronize();
  const c10::Stream stream = new_stream(cuda(0));
  x.slice(1, 0, 2).fill_(1);
  {
    const c10::StreamGuard guard(stream);
    EXPECT_EQ(refusal([&] { x.slice(1, 2, 4).fill_(2); }), "");
    EXPECT_NE(refusal([&] { x.slice(1, 1, 3).fill_(3); }), "");
  }
  stream.synchronize();
}

// --- (b) Work is on its device
// ---------------------------------------------------

TEST_F(MockCudaTest, ALaunchNeedsTheDeviceOfItsStream) {
  const c10::Stream stream = new_stream(cuda(1));
  const auto launch_there = [&] {
    launch("kernel", handle(stream), {}, [] {});
  };
  EXPECT_EQ(
      refusal(launch_there),
      "mock_cuda: kernel was launched on stream 1 of cuda:1 while the current "
      "device is cuda:0");
  const c10::DeviceGuard guard(cuda(1));
  EXPECT_EQ(refusal(launch_there), "");
}

TEST_F(MockCudaTest, TheNullStreamIsThatOfTheCurrentDevice) {
  const at::Tensor x = at::zeros(4, cuda(1));
  const auto touch = [&] {
    launch(
        "kernel",
        handle(current_stream(cuda(1))),
        ranges_of(x, /*is_write=*/true),
        [] {});
  };
  EXPECT_NE(
      refusal(touch).find("kernel on stream 0 of cuda:0 touches memory of"),
      std::string::npos);
  const c10::DeviceGuard guard(cuda(1));
  EXPECT_EQ(refusal(touch), "");
}

TEST_F(MockCudaTest, AnOperatorTakesTensorsOfOneDevice) {
  const at::Tensor x = at::zeros(4, cuda(0));
  const auto add = [&](const at::Tensor& other) {
    const std::vector<at::Tensor> others{other};
    return refusal([&] { at::_foreach_add_(x, others); });
  };
  EXPECT_NE(add(at::zeros(4, cuda(1))).find("same device"), std::string::npos);
  EXPECT_EQ(
      refusal([&] { x.equal(at::zeros(4, cuda(1))); }),
      "mock_cuda: expected tensors of one device, but got cuda:0 and cuda:1");
  EXPECT_NE(
      refusal([&] { x.equal(at::zeros(4)); }).find("a tensor of the CPU"),
      std::string::npos);
  EXPECT_EQ(add(at::ones(4, cuda(0))), "");
  EXPECT_EQ(refusal([&] { x.add_(at::scalar_tensor(1)); }), "");
}

// --- (c) Peer access
// -------------------------------------------------------------

TEST_F(MockCudaTest, ALaunchNeedsAccessToPeers) {
  const at::Tensor x = at::zeros(4, cuda(1));
  current_stream(cuda(1)).synchronize();
  EXPECT_EQ(
      refusal([&] { launch_on(x, /*is_write=*/false); }),
      "mock_cuda: kernel on stream 0 of cuda:0 touches memory of stream 0 of "
      "cuda:1 without peer access to it");
  enable_peer_access(1, 0); // the other way
  EXPECT_NE(refusal([&] { launch_on(x, /*is_write=*/false); }), "");
  EXPECT_TRUE(enable_peer_access(0, 1));
  EXPECT_EQ(refusal([&] { launch_on(x, /*is_write=*/false); }), "");
  current_stream(cuda(0)).synchronize();
}

TEST_F(MockCudaTest, ACopyEnablesPeerAccessOfTheSource) {
  const at::Tensor x = at::zeros(1, cuda(0));
  const at::Tensor y = at::empty(1, cuda(1));
  y.copy_(x);
  current_stream(cuda(1)).synchronize();
  EXPECT_EQ(refusal([&] { launch_on(y, /*is_write=*/false); }), "");
  const c10::DeviceGuard guard(cuda(1));
  EXPECT_NE(refusal([&] { launch_on(x, /*is_write=*/false); }), "");
  current_stream(cuda(0)).synchronize();
}

TEST_F(MockCudaTest, TopologiesDefinePeers) {
  reset(4, Topology::kPairs);
  EXPECT_TRUE(enable_peer_access(0, 1));
  EXPECT_TRUE(enable_peer_access(3, 2));
  EXPECT_FALSE(enable_peer_access(1, 2));
  reset(4, Topology::kNone);
  EXPECT_FALSE(enable_peer_access(0, 1));
}

// --- (d) Memory is not freed in use
// -------------------------------------

TEST_F(MockCudaTest, AFreeMustNotOvertakeOtherStreams) {
  at::Tensor x = at::zeros(4, cuda(0));
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), stream);
  {
    const c10::StreamGuard guard(stream);
    x.add_(1);
  }
  EXPECT_EQ(
      refusal([&] { x.reset(); }),
      "mock_cuda: memory of stream 0 of cuda:0 was freed while aten::add on "
      "stream 1 of cuda:0 may still use it");
}

TEST_F(MockCudaTest, RecordStreamKeepsMemoryForAStream) {
  at::Tensor x = at::zeros(4, cuda(0));
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), stream);
  {
    const c10::StreamGuard guard(stream);
    x.add_(1);
  }
  x.record_stream(stream);
  EXPECT_EQ(refusal([&] { x.reset(); }), "");
}

TEST_F(MockCudaTest, AWaitingStreamMayFree) {
  at::Tensor x = at::zeros(4, cuda(0));
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), stream);
  {
    const c10::StreamGuard guard(stream);
    x.add_(1);
  }
  order(stream, current_stream(cuda(0)));
  EXPECT_EQ(refusal([&] { x.reset(); }), "");
}

TEST_F(MockCudaTest, FreedMemoryIsPoisonedAndReused) {
  at::Tensor x = at::zeros(4, cuda(0));
  const void* data = x.const_data_ptr();
  x.reset();
  EXPECT_NE(
      refusal([&] { launch("late", nullptr, Range{data, 4, false}, [] {}); })
          .find(
              "late on stream 0 of cuda:0 touches memory of stream 0 of cuda:0 "
              "that was freed"),
      std::string::npos);
  x = at::empty(4, cuda(0));
  EXPECT_EQ(x.const_data_ptr(), data);
  EXPECT_TRUE(std::isnan(x.sum().item<float>()));
}

TEST_F(MockCudaTest, ALaunchMustStayInItsBlocks) {
  const at::Tensor x = at::zeros(4, cuda(0));
  const at::Tensor on_cpu = at::zeros(4);
  const auto touch = [&](const void* begin, size_t num_bytes) {
    return refusal([&] {
      launch("kernel", nullptr, Range{begin, num_bytes, true}, [] {});
    });
  };
  EXPECT_EQ(touch(x.const_data_ptr(), 16), "");
  EXPECT_NE(touch(x.const_data_ptr(), 17).find("behind"), std::string::npos);
  EXPECT_NE(
      touch(on_cpu.const_data_ptr(), 16).find("no device's"),
      std::string::npos);
}

// --- (e) The host reads what it has waited for
// -----------------------------------

TEST_F(MockCudaTest, TheHostMustWaitForANonblockingCopy) {
  const at::Tensor x = at::ones(4, cuda(0));
  const at::Tensor on_cpu = at::empty(4);
  on_cpu.copy_(x, /*non_blocking=*/true);
  EXPECT_EQ(
      refusal([&] { on_cpu.sum(); }),
      "mock_cuda: aten::sum on the host reads memory that aten::copy_ on stream "
      "0 of cuda:0 writes, and nothing orders the two");
  current_stream(cuda(0)).synchronize();
  EXPECT_EQ(on_cpu.sum().item<float>(), 4);
}

TEST_F(MockCudaTest, TheHostMustNotOverwriteTheSourceOfACopy) {
  const at::Tensor x = at::empty(4, cuda(0));
  const at::Tensor on_cpu = at::ones(4);
  x.copy_(on_cpu, /*non_blocking=*/true);
  EXPECT_EQ(refusal([&] { on_cpu.sum(); }), "");
  EXPECT_NE(refusal([&] { on_cpu.zero_(); }), "");
  current_stream(cuda(0)).synchronize();
  EXPECT_EQ(refusal([&] { on_cpu.zero_(); }), "");
}

TEST_F(MockCudaTest, ABlockingCopyIsDone) {
  const at::Tensor x = at::ones(4, cuda(0));
  EXPECT_EQ(x.cpu().sum().item<float>(), 4);
}

// --- Copies, counters, streams
// ---------------------------------------------------

TEST_F(MockCudaTest, ACopyBetweenDevicesIsOrderedWithBothStreams) {
  const at::Tensor x = at::ones(4, cuda(0));
  const at::Tensor y = at::zeros(4, cuda(1));
  y.copy_(x);
  y.add_(1);
  x.zero_();
  EXPECT_EQ(y.sum().item<float>(), 8);
}

TEST_F(MockCudaTest, ACopyBetweenDevicesIsNotOrderedWithAThirdStream) {
  const at::Tensor x = at::ones(4, cuda(0));
  const at::Tensor y = at::zeros(4, cuda(1));
  y.copy_(x);
  const c10::StreamGuard guard(new_stream(cuda(0)));
  EXPECT_NE(refusal([&] { x.zero_(); }), "");
}

TEST_F(MockCudaTest, CountsWork) {
  const c10::Stream stream = current_stream(cuda(0));
  const at::Tensor x = at::zeros(4, cuda(0));
  order(stream, stream);
  launch_on(x, /*is_write=*/true);
  x.cpu();
  const Counters& counts = counters();
  EXPECT_EQ(counts.allocations, 1);
  EXPECT_EQ(counts.operators, 2);
  EXPECT_EQ(counts.launches, 1);
  EXPECT_EQ(counts.records, 1);
  EXPECT_EQ(counts.waits, 1);
  EXPECT_EQ(counts.synchronizations, 1);
}

TEST_F(MockCudaTest, AnEventStaysOnItsDevice) {
  c10::Event event(c10::kCUDA);
  event.record(current_stream(cuda(0)));
  EXPECT_NE(refusal([&] { event.record(current_stream(cuda(1))); }), "");
}

TEST_F(MockCudaTest, AnEventIsDoneOnceTheHostHasWaited) {
  c10::Event event(c10::kCUDA);
  const at::Tensor x = at::zeros(4, cuda(0));
  event.record(current_stream(cuda(0)));
  EXPECT_FALSE(event.query());
  event.synchronize();
  EXPECT_TRUE(event.query());
}

TEST_F(MockCudaTest, ATensorThatOutlivesItsDevicesIsReported) {
  at::Tensor x = at::zeros(4, cuda(0));
  EXPECT_NE(refusal([&] { reset(1); }), "");
  x.reset();
}

} // namespace
} // namespace torchkv::mock_cuda

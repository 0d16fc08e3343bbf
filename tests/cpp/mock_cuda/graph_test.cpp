// Graphs of the fake devices: replays, and each possible error of a capture.
#include "graph.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "devices_test.h"

namespace torchkv::mock_cuda {
namespace {

class GraphTest : public DevicesTest {
 protected:
  // Captures the call's work on the current stream, which is `stream`.
  template <class Call>
  std::unique_ptr<Graph> captured(Call call) {
    const c10::StreamGuard guard(stream);
    begin_capture(stream);
    call();
    return end_capture(stream);
  }
  // The error of the call in a capture, which then fails.
  template <class Call>
  std::string mistake(Call call) {
    const c10::StreamGuard guard(stream);
    begin_capture(stream);
    const std::string said = refusal(call);
    EXPECT_EQ(refusal([&] { end_capture(stream); }), said);
    return said;
  }

  static at::Tensor numbers(double first, c10::ScalarType dtype = at::kFloat) {
    return (at::arange(6, dtype) + first).view({2, 3}).to(cuda(0));
  }

  c10::Stream here = current_stream(cuda(0));
  c10::Stream stream = new_stream(cuda(0));
  c10::Stream other = new_stream(cuda(0));
  at::Tensor x = numbers(0);
  at::Tensor y = numbers(0);
};

// --- What a replay does
// -------------------------------------------------------------------------

TEST_F(GraphTest, ACaptureRunsNothingAndAReplayAll) {
  int num_runs = 0;
  const auto graph = captured([&] {
    launch("kernel", stream.native_handle(), {}, [&] { ++num_runs; });
    x.add_(1);
    y.copy_(x);
  });
  EXPECT_EQ(num_runs, 0);
  EXPECT_TRUE(at::equal(x.cpu(), numbers(0).cpu()));
  EXPECT_TRUE(at::equal(y.cpu(), numbers(0).cpu()));
  for (int i = 1; i <= 3; ++i) {
    graph->replay(here);
    EXPECT_EQ(num_runs, i);
    EXPECT_TRUE(at::equal(y.cpu(), numbers(i).cpu()));
  }
}

// Each in a capture whose inputs change before each replay.
TEST_F(GraphTest, OperatorsUseTheCurrentContents) {
  using Call = void (*)(const at::Tensor& x, const at::Tensor& y);
  const std::vector<Call> calls{
      [](const auto& x, const auto& y) { y.copy_(x * 2 + x.sum(0)); },
      [](const auto& x, const auto& y) {
        y.mul_(2).addcmul_(x, x).lerp_(x, 1);
      },
      [](const auto& x, const auto& y) {
        at::Tensor out = y;
        at::mul_out(out, x, x);
      },
      [](const auto& x, const auto& y) {
        at::Tensor out = at::empty(0, x.options());
        at::mul_out(out, x, x);
        y.copy_(out);
      },
      [](const auto& x, const auto& y) {
        std::vector<at::Tensor> all{x.clone(), y};
        at::_foreach_add_(all, 1);
        y.copy_(at::stack(all).sum(0));
      },
      [](const auto& x, const auto& y) {
        y.select(0, 1).copy_(x.t().slice(1, 0, 1).squeeze(1).to(at::kHalf));
      },
  };
  for (const auto& call : calls) {
    const at::Tensor eager = y.clone();
    order(here, stream);
    const auto graph = captured([&] { call(x, y); });
    for (int i = 0; i < 3; ++i) {
      x.copy_(numbers(i * i));
      graph->replay(here);
      call(x, eager);
      EXPECT_TRUE(at::equal(y.cpu(), eager.cpu()));
    }
  }
}

TEST_F(GraphTest, MemoryOfACaptureBelongsToTheGraph) {
  order(here, stream);
  const int64_t before = num_live_blocks();
  const void* data = nullptr;
  auto graph = captured([&] {
    const at::Tensor made = x * 2;
    data = made.const_data_ptr();
    y.copy_(made);
  });
  EXPECT_EQ(num_live_blocks(), before + 1);
  {
    const c10::StreamGuard guard(stream);
    EXPECT_NE(at::empty({2, 3}, cuda(0)).const_data_ptr(), data);
  }
  graph->replay(here);
  EXPECT_TRUE(at::equal(y.cpu(), x.cpu() * 2));
  graph.reset();
  EXPECT_EQ(num_live_blocks(), before);
}

TEST_F(GraphTest, AResultOfACaptureMayOutliveTheGraph) {
  order(here, stream);
  at::Tensor made;
  auto graph = captured([&] { made = x * 2; });
  graph->replay(stream);
  graph.reset();
  const c10::StreamGuard guard(stream);
  EXPECT_TRUE(at::equal(made.cpu(), x.cpu() * 2));
}

// --- A replay is work of its stream
// -------------------------------------------------------------------------

TEST_F(GraphTest, AReplayIsCheckedAsWorkOfItsStream) {
  const auto graph = captured([&] { x.add_(1); });
  x.mul_(2);
  EXPECT_EQ(
      refusal([&] { graph->replay(other); }),
      "mock_cuda: aten::add on stream 2 of cuda:0 reads memory that aten::mul "
      "on stream 0 of cuda:0 writes, and nothing orders the two");
  order(here, other);
  EXPECT_EQ(refusal([&] { graph->replay(other); }), "");
  EXPECT_NE(refusal([&] { x.mul_(2); }), "");
  order(other, here);
  EXPECT_EQ(refusal([&] { x.mul_(2); }), "");
}

TEST_F(GraphTest, ReplaysOfOneGraphAreSerialized) {
  const auto graph = captured([&] { x.add_(1); });
  graph->replay(stream);
  EXPECT_EQ(refusal([&] { graph->replay(other); }), "");
  order(other, here);
}

TEST_F(GraphTest, ForksAndJoinsOrderTheirWork) {
  const auto graph = captured([&] {
    x.add_(1);
    order(stream, other);
    {
      const c10::StreamGuard guard(other);
      y.copy_(x);
    }
    order(other, stream);
    x.add_(y);
  });
  for (int i = 0; i < 2; ++i) {
    const at::Tensor expected = (x.cpu() + 1) * 2;
    graph->replay(here);
    EXPECT_TRUE(at::equal(x.cpu(), expected));
  }
}

TEST_F(GraphTest, ForksAreNotOrderedWithEachOther) {
  const auto graph = captured([&] {
    order(stream, other);
    {
      const c10::StreamGuard guard(other);
      x.add_(1);
    }
    x.mul_(2);
    order(other, stream);
  });
  EXPECT_NE(
      refusal([&] { graph->replay(here); }).find("nothing orders the two"),
      std::string::npos);
  c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(0);
}

// Otherwise work outside of a graph could hide an error in it.
TEST_F(GraphTest, AForkIsNotOrderedWithItsStreamOutside) {
  const auto graph = captured([&] {
    order(stream, other);
    {
      const c10::StreamGuard guard(other);
      x.add_(1);
    }
    order(other, stream);
  });
  {
    const c10::StreamGuard guard(other);
    x.mul_(2);
  }
  EXPECT_NE(refusal([&] { graph->replay(here); }), "");
  order(other, here);
  EXPECT_EQ(refusal([&] { graph->replay(here); }), "");
}

TEST_F(GraphTest, AReplayNeedsItsMemory) {
  const auto graph = captured([&] { x.add_(1); });
  x.reset();
  EXPECT_NE(
      refusal([&] { graph->replay(here); }).find("that was freed"),
      std::string::npos);
}

// --- Errors in a capture
// -------------------------------------------------------------------------

TEST_F(GraphTest, ADefaultStreamIsNotCaptured) {
  EXPECT_NE(refusal([&] { begin_capture(here); }), "");
}

TEST_F(GraphTest, TheTableReportsCaptures) {
  const auto is_captured = [](c10::Stream asked) {
    bool result = false;
    EXPECT_EQ(table().is_capturing(asked.native_handle(), &result), 0);
    return result;
  };
  EXPECT_FALSE(is_captured(stream));
  captured([&] {
    EXPECT_TRUE(is_captured(stream));
    EXPECT_FALSE(is_captured(other));
    order(stream, other);
    EXPECT_TRUE(is_captured(other));
  });
  EXPECT_FALSE(is_captured(stream));
  EXPECT_FALSE(is_captured(other));
}

TEST_F(GraphTest, WorkOfAForkMustBeJoined) {
  begin_capture(stream);
  order(stream, other);
  {
    const c10::StreamGuard guard(other);
    x.add_(1);
  }
  EXPECT_EQ(
      refusal([&] { end_capture(stream); }),
      "mock_cuda: a capture ends with work of stream 2 of cuda:0 that stream 1 "
      "of cuda:0 does not wait for");
  begin_capture(stream);
  order(stream, other); // no work
  EXPECT_EQ(refusal([&] { end_capture(stream); }), "");
}

TEST_F(GraphTest, ACaptureEndsOnItsStream) {
  begin_capture(stream);
  order(stream, other);
  EXPECT_NE(refusal([&] { end_capture(other); }), "");
  EXPECT_EQ(refusal([&] { end_capture(stream); }), "");
  EXPECT_NE(refusal([&] { end_capture(stream); }), "");
}

TEST_F(GraphTest, WaitsForWorkOutsideAreRejected) {
  EXPECT_EQ(
      mistake([&] { order(here, stream); }),
      "mock_cuda: stream 1 of cuda:0 waits for an event from outside of its "
      "capture");
}

TEST_F(GraphTest, WaitsForAnEndedCaptureAreRejected) {
  c10::Event event(c10::kCUDA);
  captured([&] { event.record(stream); });
  EXPECT_EQ(
      refusal([&] { event.block(here); }),
      "mock_cuda: stream 0 of cuda:0 waits for an event of a capture that has "
      "ended");
  EXPECT_NE(mistake([&] { event.block(stream); }), "");
  EXPECT_NE(refusal([&] { event.synchronize(); }), "");
  EXPECT_NE(refusal([&] { event.query(); }), "");
  event.record(here);
  EXPECT_EQ(refusal([&] { event.block(other); }), "");
}

TEST_F(GraphTest, DefaultStreamsCannotJoin) {
  EXPECT_NE(mistake([&] { order(stream, here); }), "");
}

TEST_F(GraphTest, CapturesCannotBeJoined) {
  begin_capture(other);
  const std::string said = mistake([&] { order(other, stream); });
  EXPECT_NE(said.find("another capture"), std::string::npos);
  EXPECT_EQ(refusal([&] { end_capture(other); }), said);
}

TEST_F(GraphTest, TheHostMayNeitherWaitNorQuery) {
  c10::Event event(c10::kCUDA);
  event.record(here);
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  EXPECT_EQ(
      mistake([&] { stream.synchronize(); }),
      "mock_cuda: cudaStreamSynchronize while a stream is captured");
  EXPECT_NE(mistake([&] { here.synchronize(); }), "");
  EXPECT_NE(mistake([&] { stream.query(); }), "");
  EXPECT_NE(mistake([&] { event.synchronize(); }), "");
  EXPECT_NE(mistake([&] { event.query(); }), "");
  EXPECT_NE(mistake([&] { guard.synchronizeDevice(0); }), "");
  EXPECT_NE(mistake([&] { x.equal(y); }), "");
  EXPECT_EQ(refusal([&] { stream.synchronize(); }), "");
}

// Rather than run at once, or omitted from the graph.
TEST_F(GraphTest, UnmodelledOperatorsAreRejected) {
  const at::Tensor on_cpu = at::zeros({2, 3});
  const auto graph = captured([&] { x.add_(1); });
  const auto refused = [&](auto call) {
    begin_capture(stream);
    std::string said;
    {
      const c10::StreamGuard guard(stream);
      said = refusal(call);
    }
    end_capture(stream);
    return said.find("in a capture is not modelled") != std::string::npos;
  };
  EXPECT_TRUE(refused([&] { x.copy_(on_cpu, /*non_blocking=*/true); }));
  at::Tensor mean = y[0];
  at::Tensor variance = y[1];
  EXPECT_TRUE(refused([&] { // writes two, and makes others
    at::_native_batch_norm_legit(x, {}, {}, mean, variance, true, 0.5, 1e-5);
  }));
  EXPECT_TRUE(refused([&] { graph->replay(stream); }));
}

} // namespace
} // namespace torchkv::mock_cuda

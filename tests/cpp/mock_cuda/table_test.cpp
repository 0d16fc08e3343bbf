// Launches of the store's kernels are checked by the pointers of their keys.
#include "table.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "devices_test.h"
#include "graph.h"
#include "kernels/cuda/pack.h"

namespace torchkv::mock_cuda {
namespace {

using kernels::cuda::Dtype;
using kernels::cuda::Launches;
using kernels::cuda::SumJob;

constexpr int64_t kSize = 1000;

class TableTest : public DevicesTest {
 protected:
  // stored = adam(stored, sum of values), on the current stream of cuda:0.
  std::string step() {
    return refusal([&] {
      Launches launches(table(), nullptr);
      std::vector<const void*> pointers;
      for (const auto& value : values) {
        pointers.push_back(value.const_data_ptr());
      }
      SumJob job;
      job.values = pointers.data();
      job.num_values = pointers.size();
      job.stored = stored.mutable_data_ptr();
      job.states = {m.mutable_data_ptr(), v.mutable_data_ptr(), nullptr};
      job.num_elements = kSize;
      job.step = &adam;
      launches.add(job);
      EXPECT_EQ(launches.finish(), 0);
    });
  }

  RuleStep adam = [] {
    RuleStep step;
    step.rule = make_rule("test", "adam", {{"lr", 0.5}});
    return step;
  }();
  at::Tensor stored = at::zeros(kSize, cuda(0));
  at::Tensor m = at::zeros(kSize, cuda(0));
  at::Tensor v = at::zeros(kSize, cuda(0));
  std::vector<at::Tensor> values{
      at::ones(kSize, cuda(0)),
      at::ones(kSize, cuda(0))};
};

TEST_F(TableTest, ASumIsALaunch) {
  counters() = {};
  EXPECT_EQ(step(), "");
  EXPECT_EQ(counters().launches, 1);
  EXPECT_TRUE(at::allclose(stored.cpu(), at::full(kSize, -0.5)));
}

// One at a time, everything that it touches is used by another stream.
TEST_F(TableTest, ASumIsOrderedWithAllItsMemory) {
  EXPECT_EQ(step(), "");
  const c10::Stream stream = new_stream(cuda(0));
  for (const auto& tensor : {stored, m, v, values[0], values[1]}) {
    order(current_stream(cuda(0)), stream);
    {
      const c10::StreamGuard guard(stream);
      tensor.slice(0, kSize - 1).zero_();
    }
    EXPECT_NE(step().find("sum on stream 0 of cuda:0"), std::string::npos);
    order(stream, current_stream(cuda(0)));
    EXPECT_EQ(step(), "");
  }
}

TEST_F(TableTest, ASumNeedsAccessToPeers) {
  values[1] = at::ones(kSize, cuda(1));
  current_stream(cuda(1)).synchronize();
  EXPECT_NE(step().find("without peer access"), std::string::npos);
  EXPECT_EQ(table().enable_peer(0, 1), 0);
  EXPECT_EQ(step(), "");
  order(current_stream(cuda(0)), current_stream(cuda(1)));
}

TEST_F(TableTest, ACopyReadsItsSourceAndWritesItsOuts) {
  std::vector<void*> outs{m.mutable_data_ptr(), stored.mutable_data_ptr()};
  const auto copy = [&] {
    return refusal([&] {
      Launches launches(table(), nullptr);
      launches.add_copy(
          values[0].const_data_ptr(), outs.data(), outs.size(), kSize * 4);
      EXPECT_EQ(launches.finish(), 0);
    });
  };
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), stream);
  {
    const c10::StreamGuard guard(stream);
    values[0].sum();
    m.sum();
  }
  EXPECT_NE(
      copy().find("copy on stream 0 of cuda:0 writes"), std::string::npos);
  order(stream, current_stream(cuda(0)));
  EXPECT_EQ(copy(), "");
  EXPECT_TRUE(at::equal(stored.cpu(), at::ones(kSize)));
}

// PyTorch refuses large parameters while it captures.
TEST_F(TableTest, ACaptureTakesOnlySmallParameters) {
  const c10::Stream stream = new_stream(cuda(0));
  const c10::StreamGuard guard(stream);
  order(current_stream(cuda(0)), stream);
  std::vector<void*> outs{m.mutable_data_ptr()};
  for (const size_t limit :
       {kernels::cuda::kSmallParams, kernels::cuda::kLargeParams}) {
    begin_capture(stream);
    const std::string said = refusal([&] {
      Launches launches(table(), stream.native_handle(), limit);
      for (int i = 0; i < 200; ++i) {
        launches.add_copy(stored.const_data_ptr(), outs.data(), 1, 4);
      }
      launches.finish();
    });
    EXPECT_EQ(
        said.find("bytes of parameters in a capture") == std::string::npos,
        limit == kernels::cuda::kSmallParams);
    end_capture(stream);
  }
}

// If it is not the current device, a query would create a context there.
TEST_F(TableTest, AStreamIsQueriedOnItsDevice) {
  const c10::Stream stream = new_stream(cuda(1));
  bool result = false;
  EXPECT_NE(
      refusal([&] {
        table().is_capturing(stream.native_handle(), &result);
      }).find("while the current device is cuda:0"),
      std::string::npos);
  EXPECT_FALSE(kernels::cuda::is_capturing(stream));
  EXPECT_FALSE(
      kernels::cuda::is_capturing(c10::Stream(c10::Stream::DEFAULT, cuda(1))));
  EXPECT_EQ(current_device(), cuda(0));
}

TEST_F(TableTest, ALaunchNeedsCode) {
  set_has_code(0, false);
  EXPECT_NE(step().find("for which there is no code"), std::string::npos);
  EXPECT_TRUE(kernels::cuda::has_kernels(cuda(1)));
  EXPECT_FALSE(kernels::cuda::has_kernels(cuda(0)));
}

TEST_F(DevicesTest, PeersAreThoseOfTheTopology) {
  reset(4, Topology::kPairs);
  EXPECT_EQ(table().enable_peer(2, 3), 0);
  const int error = table().enable_peer(1, 2);
  EXPECT_NE(error, 0);
  EXPECT_STREQ(table().error_string(error), "an error of the mock");
}

} // namespace
} // namespace torchkv::mock_cuda

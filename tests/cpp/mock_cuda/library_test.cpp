// Where there are no kernels, the driver is asked.
#include "kernels/cuda/library.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <memory>

#include "devices_test.h"
#include "stores.h"

namespace torchkv::mock_cuda {
namespace {

using kernels::cuda::is_capturing;

class WithoutKernelsTest : public DevicesTest {
 protected:
  WithoutKernelsTest() : DevicesTest(2) {
    kernels::cuda::set_table(nullptr);
  }
};

TEST_F(WithoutKernelsTest, ACaptureIsRecognized) {
  const c10::Stream stream = new_stream(cuda(0));
  EXPECT_FALSE(is_capturing(stream));
  EXPECT_FALSE(is_capturing(current_stream(cuda(0))));
  begin_capture(stream);
  EXPECT_TRUE(is_capturing(stream));
  EXPECT_FALSE(is_capturing(new_stream(cuda(1))));
  end_capture(stream);
  EXPECT_FALSE(is_capturing(stream));
}

// After the same on another stream.
TEST_F(WithoutKernelsTest, AStoreIsCaptured) {
  const auto store = make_store();
  const at::Tensor value = at::ones(5, cuda(0));
  const at::Tensor out = at::zeros(5, cuda(0));
  store->init(3, value);
  store->set_optimizer("sgd", {{"lr", 1}});
  store->push(3, value);
  const c10::Stream stream = new_stream(cuda(0));
  order(current_stream(cuda(0)), stream);
  std::unique_ptr<Graph> graph;
  EXPECT_EQ(
      refusal([&] {
        const c10::StreamGuard guard(stream);
        begin_capture(stream);
        store->push(3, value);
        store->pull(3, out);
        graph = end_capture(stream);
      }),
      "");
  ASSERT_NE(graph, nullptr);
  for (const double expected : {-1, -2}) {
    graph->replay(current_stream(cuda(0)));
    EXPECT_TRUE(at::equal(out.cpu(), at::full(5, expected, at::kFloat)));
  }
}

} // namespace
} // namespace torchkv::mock_cuda

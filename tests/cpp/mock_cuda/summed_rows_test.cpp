// Which sums of rows are launched on a fake GPU for lists with dense values;
// row_sparse_test.cpp has the results of all kinds of values.
#include "comm/summed_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "devices_test.h"
#include "kernels/cuda/library.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::cuda;
using mock_cuda::make_store;

class SummedRowsOnGpuTest : public mock_cuda::DevicesTest {
 protected:
  SummedRowsOnGpuTest() : DevicesTest(1) {
    static kernels::cuda::Table counting;
    counting = mock_cuda::table();
    counting.launch_row_sums = [](kernels::cuda::RowSums call, void* stream) {
      ++(call.added_to == nullptr ? num_sums() : num_added());
      return mock_cuda::table().launch_row_sums(call, stream);
    };
    kernels::cuda::set_table(&counting);
    num_sums() = num_added() = 0;
  }

  static int& num_sums() {
    static int count = 0;
    return count;
  }
  static int& num_added() {
    static int count = 0;
    return count;
  }
  static at::Tensor rows(const std::vector<int64_t>& ids) {
    const at::Tensor numbers = at::randn({static_cast<int64_t>(ids.size()), 3});
    return at::sparse_coo_tensor(
        at::tensor(ids, at::kLong).unsqueeze(0), numbers, {9, 3});
  }
};

TEST_F(SummedRowsOnGpuTest, OneLaunchAddsTheRowsOfSuccessiveValues) {
  at::manual_seed(0);
  const std::vector<at::Tensor> values{
      rows({7, 7, 1}),
      at::randn({9, 3}),
      rows({2, 7}),
      rows({0, 2, 2}),
      at::randn({9, 3}),
      at::randn({9, 3}),
      rows({8})};
  const auto expected = make_store("local");
  const auto store = make_store();
  expected->init(3, at::zeros({9, 3}));
  store->init(3, at::zeros({9, 3}).to(cuda(0)));
  std::vector<at::Tensor> on_gpu;
  for (const auto& value : values) {
    on_gpu.push_back(
        value.is_sparse() ? at::_sparse_coo_tensor_with_dims_and_tensors(
                                1,
                                1,
                                value.sizes(),
                                value._indices().to(cuda(0)),
                                value._values().to(cuda(0)),
                                value.options().device(cuda(0)),
                                /*is_coalesced=*/false)
                          : value.to(cuda(0)));
  }
  expected->push(3, Tensors::replicas(values));
  store->push(3, Tensors::replicas(on_gpu));
  EXPECT_EQ(num_added(), 3);
  EXPECT_EQ(num_sums(), 0);
  EXPECT_TRUE(at::equal(store->pull(3)[0].cpu(), expected->pull(3)[0]));
}

} // namespace
} // namespace torchkv

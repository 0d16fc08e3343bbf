// Lookups of rows with ids on fake GPUs: results, the order of all work, and
// how often the host waits.
#include "store/row_pull.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "devices_test.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::counters;
using mock_cuda::cuda;
using mock_cuda::make_store;
using mock_cuda::refusal;

class RowPullOnGpuTest : public mock_cuda::DevicesTest {
 protected:
  RowPullOnGpuTest() : DevicesTest(2) {
    store_->init(3, on(cuda(0), value_));
  }

  static at::Tensor on(c10::Device device, const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.options().device(device))
        .copy_(tensor);
  }
  static at::Tensor some_ids(c10::ScalarType dtype = at::kLong) {
    return at::tensor({4, 0, 49, 4}, dtype).view({2, 2});
  }
  at::Tensor expected() const {
    return value_.index({some_ids()});
  }

  const at::Tensor value_ = at::arange(150, at::kFloat).view({50, 3});
  mock_cuda::StorePtr store_ = make_store();
};

// For whether all of them are rows.
TEST_F(RowPullOnGpuTest, TheHostWaitsOnceForIdsWhereTheValueIs) {
  for (const auto dtype : {at::kLong, at::kInt}) {
    const at::Tensor ids = on(cuda(0), some_ids(dtype));
    const at::Tensor out = on(cuda(0), at::zeros({2, 2, 3}));
    counters() = {};
    store_->row_sparse_pull(3, ids, out);
    EXPECT_EQ(counters().synchronizations, 1);
    EXPECT_TRUE(at::equal(out.cpu(), expected()));
  }
  EXPECT_TRUE(
      at::equal(
          store_->row_sparse_pull(3, on(cuda(0), some_ids()))[0].cpu(),
          expected()));
  const at::Tensor none = on(cuda(0), at::empty({0, 2}, at::kInt));
  counters() = {};
  EXPECT_EQ(
      store_->row_sparse_pull(3, none)[0].sizes(), c10::IntArrayRef({0, 2, 3}));
  EXPECT_EQ(counters().synchronizations, 0);
}

TEST_F(RowPullOnGpuTest, TheHostWaitsOnceForAllIdsOnADevice) {
  store_->init(4, on(cuda(1), value_));
  store_->init(5, on(cuda(0), value_));
  std::vector<at::Tensor> ids;
  std::vector<at::Tensor> outs;
  for (const int device : {0, 1, 0}) {
    ids.push_back(on(cuda(device), some_ids()));
    outs.push_back(on(cuda(device), at::zeros({2, 2, 3})));
  }
  const Keys keys{3, 4, 5};
  counters() = {};
  store_->row_sparse_pull(
      keys, Tensors::one_each(ids), Tensors::one_each(outs));
  EXPECT_EQ(counters().synchronizations, 2);
  for (const auto& out : outs) {
    EXPECT_TRUE(at::equal(out.cpu(), expected()));
  }
  const auto bad = at::tensor({0L, 51L});
  ids[1] = on(cuda(1), bad);
  ids[2] = on(cuda(0), bad);
  outs[1] = on(cuda(1), at::zeros({2, 3}));
  outs[2] = on(cuda(0), at::zeros({2, 3}));
  outs[0].fill_(7);
  const std::string error = refusal([&] {
    store_->row_sparse_pull(
        keys, Tensors::one_each(ids), Tensors::one_each(outs));
  });
  EXPECT_NE(error.find("but got 51 (key 5)"), std::string::npos) << error;
  EXPECT_TRUE(at::equal(outs[0].cpu(), at::full({2, 2, 3}, 7.F)));
}

TEST_F(RowPullOnGpuTest, IdsOnAnyDevice) {
  const at::Tensor large = at::rand({60'000, 4}); // sharded by the push
  store_->init(4, on(cuda(0), large));
  store_->push(4, Tensors::replicas({on(cuda(0), large), on(cuda(1), large)}));
  store_->init(5, value_); // on the CPU
  for (const auto of_ids : {c10::Device(c10::kCPU), cuda(0), cuda(1)}) {
    for (const auto of_out : {c10::Device(c10::kCPU), cuda(0), cuda(1)}) {
      const at::Tensor ids = on(of_ids, some_ids());
      const auto pulled = [&](const Key& key, int64_t columns) {
        const at::Tensor out = on(of_out, at::zeros({2, 2, columns}));
        store_->row_sparse_pull(key, ids, out);
        return out.cpu();
      };
      EXPECT_TRUE(at::equal(pulled(3, 3), expected()));
      EXPECT_TRUE(at::equal(pulled(4, 4), 2 * large.index({some_ids()})));
      EXPECT_TRUE(at::equal(pulled(5, 3), expected()));
    }
  }
}

TEST_F(RowPullOnGpuTest, IsOrderedWithTheCallersStream) {
  const at::Tensor ids = on(cuda(0), some_ids());
  const at::Tensor out = on(cuda(0), at::zeros({2, 2, 3}));
  const c10::Stream stream = mock_cuda::new_stream(cuda(0));
  const c10::Stream callers = mock_cuda::current_stream(cuda(0));
  mock_cuda::order(callers, stream);
  {
    const c10::StreamGuard guard(stream);
    ids.add_(1);
    ids.sub_(1);
    store_->row_sparse_pull(3, ids, out);
    ids.fill_(7); // the store has read them
    EXPECT_TRUE(at::equal(out.cpu(), expected()));
  }
  mock_cuda::order(stream, callers);
}

// As after a check of ids for a key that has moved since.
TEST_F(RowPullOnGpuTest, IdsOnAGpuForAValueElsewhere) {
  const at::Tensor large = at::rand({60'000, 3});
  store_->init(4, on(cuda(0), large)); // sharded by the push
  store_->push(4, Tensors::replicas({on(cuda(0), large), on(cuda(1), large)}));
  store_->init(5, value_);
  store_->init(6, on(cuda(1), value_));
  store_->init(7, value_.to_sparse(1));
  const at::Tensor ids = on(cuda(0), some_ids().view(-1));
  for (const int64_t key : {3, 4, 5, 6, 7}) {
    for (const auto of_out : {c10::Device(c10::kCPU), cuda(0), cuda(1)}) {
      const at::Tensor rows = on(of_out, at::zeros({4, 3}));
      const RowPull pull{key, key == 4 ? 60'000 : 50, ids, rows, {}};
      store_->store()->pull_rows("test", pull);
      const at::Tensor expected_rows =
          key == 4 ? 2 * large.index({ids.cpu()}) : value_.index({ids.cpu()});
      EXPECT_TRUE(at::equal(rows.cpu(), expected_rows)) << key << of_out;
    }
  }
}

TEST_F(RowPullOnGpuTest, RowsAreOnTheDeviceOfADenseValueInOnePiece) {
  const at::Tensor large = at::rand({60'000, 3});
  store_->init(4, on(cuda(1), large));
  store_->init(5, value_);
  store_->init(6, value_.to_sparse(1));
  EXPECT_EQ(store_->row_device(3), cuda(0));
  EXPECT_EQ(store_->row_device(4), cuda(1));
  EXPECT_EQ(store_->row_device(5), c10::kCPU);
  EXPECT_EQ(store_->row_device(6), c10::kCPU);
  store_->push(4, Tensors::replicas({on(cuda(0), large), on(cuda(1), large)}));
  EXPECT_EQ(store_->row_device(4), c10::kCPU); // it is sharded
  store_->push(5, on(cuda(1), value_));
  EXPECT_EQ(store_->row_device(5), cuda(1)); // it has moved
  store_->push(5, value_);
  EXPECT_EQ(store_->row_device(5), cuda(1));
  EXPECT_NE(
      refusal([&] { store_->row_device(8); }).find("key 8"), std::string::npos);
}

// Their values are on streams of their own.
TEST_F(RowPullOnGpuTest, OnLogicalPlaces) {
  const mock_cuda::PlacesOfEnvironment places("cuda:0,cuda:0");
  const auto store = make_store();
  for (const int64_t key : {3, 4, 5}) { // on both places
    store->init(key, on(cuda(0), value_));
    store->push(
        key, Tensors::replicas({on(cuda(0), value_), on(cuda(0), value_)}));
  }
  for (const int64_t key : {3, 4, 5}) {
    const at::Tensor ids = on(cuda(0), some_ids(at::kInt));
    const at::Tensor out = store->row_sparse_pull(key, ids)[0];
    ids.zero_(); // the store has read them
    EXPECT_TRUE(at::equal(out.cpu(), 2 * expected()));
  }
}

// An out of the first lookup is the ids of the second.
TEST_F(RowPullOnGpuTest, IdsInAnOutAreReadFirst) {
  const at::Tensor numbers = at::arange(50, at::kLong).flip(0).view({50, 1});
  store_->init(4, on(cuda(0), numbers));
  const at::Tensor first = on(cuda(0), some_ids().view({4, 1}));
  const at::Tensor second = on(cuda(0), at::zeros({4, 1}, at::kLong));
  const at::Tensor ids = on(cuda(0), at::tensor({1, 2, 3, 3}, at::kLong));
  store_->row_sparse_pull(
      4,
      Tensors::replicas({ids, first.view(-1)}),
      Tensors::replicas({first, second}));
  const at::Tensor given = some_ids().view(-1);
  EXPECT_TRUE(at::equal(second.cpu(), numbers.index({given})));
  EXPECT_TRUE(at::equal(first.cpu(), numbers.index({ids.cpu()})));
}

TEST_F(RowPullOnGpuTest, BadIdsAreNamedAndNothingIsWritten) {
  for (const int64_t bad : {-1, 50}) {
    const at::Tensor ids = on(cuda(0), at::tensor({3L, bad, 99L}));
    const at::Tensor out = on(cuda(0), at::zeros({3, 3}));
    const std::string error =
        refusal([&] { store_->row_sparse_pull(3, ids, out); });
    EXPECT_NE(error.find("but got " + std::to_string(bad)), std::string::npos)
        << error;
    EXPECT_TRUE(at::equal(out.cpu(), at::zeros({3, 3})));
  }
}

} // namespace
} // namespace torchkv

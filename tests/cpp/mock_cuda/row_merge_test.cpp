// Which sparse values are merged on their fake GPU, and how often the host
// waits; row_sparse_test.cpp has the results of all kinds of values.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "devices_test.h"
#include "optimizer_helpers.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::counters;
using mock_cuda::cuda;
using mock_cuda::make_store;

constexpr int64_t kRows = 50;
constexpr int64_t kColumns = 4;

class RowMergeTest : public mock_cuda::DevicesTest {
 protected:
  RowMergeTest() : DevicesTest(2) {}

  static at::Tensor on(c10::Device device, const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.options().device(device))
        .copy_(tensor);
  }
  static at::Tensor rows(
      const std::vector<int64_t>& ids,
      c10::Device device,
      double first = 1) {
    const auto count = static_cast<int64_t>(ids.size());
    const at::Tensor values =
        at::arange(count * kColumns, at::kFloat).view({count, kColumns});
    return at::_sparse_coo_tensor_with_dims_and_tensors(
        1,
        1,
        {kRows, kColumns},
        on(device, at::tensor(ids, at::kLong)).unsqueeze(0),
        on(device, values + first),
        values.options().device(device).layout(c10::kSparse),
        /*is_coalesced=*/false);
  }
  // Keys 0, 1, ..., a value on each of the devices, with SGD.
  static mock_cuda::StorePtr store_with(
      const std::vector<c10::Device>& devices,
      const char* type = "device") {
    const auto store = make_store(type);
    for (size_t i = 0; i < devices.size(); ++i) {
      store->init(
          static_cast<int64_t>(i),
          on(devices[i], at::zeros({kRows, kColumns})));
    }
    store->set_optimizer(testing::optimizer("sgd", {{"lr", 1}}));
    return store;
  }
  // How often the host waits in a push of three values to each of the keys.
  static int64_t num_waits(
      KVStore& store,
      const std::vector<c10::Device>& devices,
      const std::vector<int64_t>& third = {9, 3}) {
    Tensors values;
    for (const auto device : devices) {
      values.append(rows({7, 3, 7}, device));
      values.append(rows({1, 3}, device));
      values.append(rows(third, device));
      values.end_group();
    }
    const Keys keys = mock_cuda::first_keys(static_cast<int>(devices.size()));
    store.push(keys, values);
    counters() = {};
    store.push(keys, values);
    return counters().synchronizations;
  }
};

TEST_F(RowMergeTest, TheHostWaitsOncePerDeviceAndOncePerKey) {
  // For the smallest and the largest ids, and for the number of rows.
  for (const auto& devices : std::vector<std::vector<c10::Device>>{
           {cuda(0)},
           {cuda(0), cuda(0), cuda(0)},
           {cuda(0), cuda(1), cuda(0), cuda(1)}}) {
    const auto store = store_with(devices);
    const int64_t num_devices = devices.size() == 4 ? 2 : 1;
    EXPECT_EQ(
        num_waits(*store, devices),
        num_devices + static_cast<int64_t>(devices.size()));
  }
}

TEST_F(RowMergeTest, EmptyValuesAreNoReasonToWait) {
  const auto store = store_with({cuda(0)});
  EXPECT_EQ(num_waits(*store, {cuda(0)}, {}), 2);
}

// There the ids of each value are copied to the host, and nothing is checked
// twice.
TEST_F(RowMergeTest, IdsAreBroughtForValuesInCpuMemory) {
  const auto store = store_with({cuda(0)}, "local");
  const Tensors values = Tensors::replicas({rows({7, 3, 7}, cuda(0))});
  counters() = {};
  store->push(0, values);
  EXPECT_EQ(counters().synchronizations, 2); // the ids and the rows
}

TEST_F(RowMergeTest, ResultsAreThoseOfTheHost) {
  const std::vector<std::vector<int64_t>> ids{{7, 3, 7, 0}, {49, 3}, {}, {3}};
  for (const auto* rule : {"", "sgd", "adam"}) {
    const auto expected = make_store("local");
    const auto store = make_store();
    for (const auto& [made, device] :
         {std::pair{expected, c10::Device(c10::kCPU)},
          std::pair{store, cuda(0)}}) {
      made->init(3, on(device, at::ones({kRows, kColumns})));
      if (*rule != 0) {
        made->set_optimizer(testing::optimizer(rule, {{"lr", 0.5}}));
      }
      for (int i = 0; i < 2; ++i) {
        std::vector<at::Tensor> values;
        for (const auto& of_value : ids) {
          values.push_back(rows(of_value, device, i + 1));
        }
        made->push(3, Tensors::replicas(values));
      }
    }
    EXPECT_TRUE(
        at::equal(store->pull(3)[0].cpu(), expected->pull(3)[0].to_dense()))
        << rule;
  }
}

TEST_F(RowMergeTest, AsynchronousCallsMayOutliveTheTensors) {
  const auto store = store_with({cuda(0)});
  const auto other = store_with({cuda(0)});
  for (int i = 0; i < 3; ++i) {
    {
      const auto work = mock_cuda::push_async(
          *store, 0, Tensors::replicas({rows({7, 3, 7}, cuda(0))}));
      // Reuses memory that the call has freed on this stream.
      const at::Tensor next =
          at::zeros({3}, at::device(cuda(0)).dtype(at::kLong));
      next.fill_(-1);
      work->wait();
    }
    other->push(0, Tensors::replicas({rows({7, 3, 7}, cuda(0))}));
  }
  EXPECT_TRUE(at::equal(store->pull(0)[0].cpu(), other->pull(0)[0].cpu()));
}

// Also where an operator of the merge runs out of it.
TEST_F(RowMergeTest, OutOfMemoryChangesNothing) {
  const auto store = store_with({cuda(0)});
  const Tensors values =
      Tensors::replicas({rows({7, 3, 7}, cuda(0)), rows({1, 3}, cuda(0))});
  store->push(0, values);
  const at::Tensor before = store->pull(0)[0].cpu();
  int num_failed = 0;
  for (bool is_done = false; !is_done; ++num_failed) {
    mock_cuda::allocations_left() = num_failed;
    try {
      store->push(0, values);
      is_done = true;
    } catch (const c10::OutOfMemoryError&) {
    }
    mock_cuda::allocations_left() = -1;
    if (!is_done) {
      EXPECT_TRUE(at::equal(store->pull(0)[0].cpu(), before)) << num_failed;
      EXPECT_EQ(store->version(0), 1);
    }
  }
  EXPECT_GT(num_failed, 8); // operators of the check and of the merge
  EXPECT_FALSE(at::equal(store->pull(0)[0].cpu(), before));
}

} // namespace
} // namespace torchkv

// Which sparse values have their ids merged on a fake GPU, and how often the
// host waits; row_sparse_test.cpp has the results of all kinds of values.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "devices_test.h"
#include "memory/merged_ids.h"
#include "optimizer_helpers.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::counters;
using mock_cuda::cuda;
using mock_cuda::make_store;

constexpr int64_t kRows = 50;
constexpr int64_t kColumns = 4;

class MergedIdsOnGpuTest : public mock_cuda::DevicesTest {
 protected:
  MergedIdsOnGpuTest() : DevicesTest(2) {}

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

// For whether ids are rows, and how many are distinct.
TEST_F(MergedIdsOnGpuTest, TheHostWaitsOncePerDevice) {
  for (const auto& devices : std::vector<std::vector<c10::Device>>{
           {cuda(0)},
           {cuda(0), cuda(0), cuda(0)},
           {cuda(0), cuda(1), cuda(0), cuda(1)}}) {
    const auto store = store_with(devices);
    EXPECT_EQ(num_waits(*store, devices), devices.size() == 4 ? 2 : 1);
  }
}

TEST_F(MergedIdsOnGpuTest, EmptyValuesAreNoReasonToWait) {
  const auto store = store_with({cuda(0)});
  EXPECT_EQ(num_waits(*store, {cuda(0)}, {}), 1);
}

// There the ids of each value are copied to the host, and nothing is checked
// twice.
TEST_F(MergedIdsOnGpuTest, IdsAreBroughtForValuesInCpuMemory) {
  const auto store = store_with({cuda(0)}, "local");
  const Tensors values = Tensors::replicas({rows({7, 3, 7}, cuda(0))});
  counters() = {};
  store->push(0, values);
  EXPECT_EQ(counters().synchronizations, 2); // the ids and the rows
}

TEST_F(MergedIdsOnGpuTest, ResultsAreThoseOfTheHost) {
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

// Two values of key 0 are in groups of their own, as values of a key that is
// there twice.
TEST_F(MergedIdsOnGpuTest, ListsHaveTheResultsOfTheHost) {
  const std::vector<c10::Device> on_host(4, c10::kCPU);
  const std::vector<c10::Device> on_gpus{cuda(0), cuda(1), cuda(0), cuda(0)};
  const auto expected = store_with(on_host, "local");
  const auto store = store_with(on_gpus);
  const std::vector<int64_t> keys{0, 1, 2, 0, 3};
  const std::vector<std::vector<int64_t>> ids{
      {7, 3, 7, 0}, {49, 3}, {}, {3, 8}, {0, 49, 0}};
  for (const auto& [made, devices] :
       {std::pair{expected, on_host}, std::pair{store, on_gpus}}) {
    for (int i = 0; i < 2; ++i) {
      Tensors values;
      for (size_t at = 0; at < keys.size(); ++at) {
        const auto device = devices[static_cast<size_t>(keys[at])];
        values.append(rows(ids[at], device, i + 1));
        values.append(rows({5, 3}, device, i));
        values.end_group();
      }
      Keys list;
      list.single = false;
      list.list.assign(keys.begin(), keys.end());
      made->push(list, values);
    }
  }
  for (int64_t key = 0; key < 4; ++key) {
    EXPECT_TRUE(
        at::equal(store->pull(key)[0].cpu(), expected->pull(key)[0].cpu()))
        << key;
  }
}

TEST_F(MergedIdsOnGpuTest, AnIdOutOfRangeChangesNoKey) {
  const auto store = store_with({cuda(0), cuda(0)});
  Tensors values;
  for (const int64_t id : {int64_t{3}, kRows}) {
    values.append(rows({1, id}, cuda(0)));
    values.end_group();
  }
  const std::string text = mock_cuda::refusal(
      [&] { store->push(mock_cuda::first_keys(2), values); });
  EXPECT_NE(text.find("but got 50 at index 1 (key 1)"), std::string::npos)
      << text;
  EXPECT_FALSE(store->pull(0)[0].cpu().any().item<bool>());
}

// Their rows cannot be counted together, so the host has the ids.
TEST_F(MergedIdsOnGpuTest, MoreRowsThanNumbers) {
  const std::vector<int64_t> sizes{kMaxMergedRows, 0};
  const auto store = make_store();
  Tensors values;
  for (int64_t key = 0; key < 2; ++key) {
    store->init(key, on(cuda(0), at::zeros(sizes)));
    values.append(
        at::_sparse_coo_tensor_with_dims_and_tensors(
            1,
            1,
            sizes,
            on(cuda(0), at::tensor({kMaxMergedRows - 1}, at::kLong))
                .unsqueeze(0),
            on(cuda(0), at::zeros({1, 0})),
            at::device(cuda(0)).dtype(at::kFloat).layout(c10::kSparse),
            /*is_coalesced=*/false));
    values.end_group();
  }
  store->push(mock_cuda::first_keys(2), values);
  EXPECT_EQ(store->version(1), 1);
}

TEST_F(MergedIdsOnGpuTest, AsynchronousCallsMayOutliveTheTensors) {
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
TEST_F(MergedIdsOnGpuTest, OutOfMemoryChangesNothing) {
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

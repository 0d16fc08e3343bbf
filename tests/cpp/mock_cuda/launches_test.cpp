// What a store asks of CUDA: launches, events, memory and NCCL, in a steady
// state.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "broken_runtime.h"
#include "devices_test.h"
#include "emulated_table.h"
#include "kvstore.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::counters;
using mock_cuda::cuda;
using mock_cuda::refusal;
using mock_cuda::StorePtr;

constexpr int kNumKeys = 50;

Keys all_keys() {
  return mock_cuda::first_keys(kNumKeys);
}

// A tensor for each key on each device.
Tensors tensors_on(int num_devices, double value) {
  Tensors result;
  for (int i = 0; i < kNumKeys; ++i) {
    for (int d = 0; d < num_devices; ++d) {
      result.append(at::full({i + 1}, value, at::device(cuda(d))));
    }
    result.end_group();
  }
  return result;
}

// A model with momentum on the store, after its first step.
struct Model {
  explicit Model(int num_devices, const char* type = "device")
      : store(c10::make_intrusive<KVStore>(type)),
        gradients(tensors_on(num_devices, 1)),
        weights(tensors_on(num_devices, 0)) {
    Tensors values;
    for (int i = 0; i < kNumKeys; ++i) {
      values.append(at::zeros({i + 1}));
      values.end_group();
    }
    store->init(all_keys(), values);
    Optimizer optimizer;
    optimizer.groups.push_back(
        make_rule("test", "sgd", {{"lr", 1}, {"momentum", 0.5}}));
    store->set_optimizer(optimizer);
    step();
    counters() = {};
  }

  void step() const {
    store->push(all_keys(), gradients);
    store->pull(all_keys(), weights);
  }

  StorePtr store;
  Tensors gradients;
  Tensors weights;
};

using LaunchesTest = mock_cuda::DevicesTest;

TEST_F(LaunchesTest, OneDeviceTakesOneLaunchEachWay) {
  const Model model(1);
  for (int i = 0; i < 3; ++i) {
    model.step();
  }
  EXPECT_EQ(counters().launches, 3 * 2);
  EXPECT_EQ(counters().operators, 0);
  EXPECT_EQ(counters().allocations, 0);
  EXPECT_EQ(counters().records, 3 * 2);
  EXPECT_EQ(counters().waits, 0);
  EXPECT_EQ(counters().synchronizations, 0);
  // -1, then -1.5, -1.75 and -1.875 more
  for (const auto& weight : model.weights.flat) {
    EXPECT_EQ(weight.cpu()[0].item<float>(), -6.125);
  }
}

TEST_F(LaunchesTest, EveryDeviceTakesOneLaunchEachWay) {
  for (const int num_devices : {2, 4}) {
    const Model model(num_devices);
    model.step();
    EXPECT_EQ(counters().launches, 2 * num_devices);
    EXPECT_EQ(counters().operators, 0);
    EXPECT_EQ(counters().allocations, 0);
    // Each home waits for the others, and they for it, both ways.
    EXPECT_EQ(counters().records, 2 * num_devices * num_devices);
    EXPECT_EQ(counters().waits, 4 * num_devices * (num_devices - 1));
    EXPECT_EQ(counters().synchronizations, 0);
  }
}

// Launches that are full go out while another device is the current one.
TEST_F(LaunchesTest, ManyKeysOfSeveralDevicesInTurn) {
  constexpr int kMany = 3000;
  const auto store = c10::make_intrusive<KVStore>("device");
  const Keys keys = mock_cuda::first_keys(kMany);
  Tensors values;
  Tensors outs;
  for (int i = 0; i < kMany; ++i) {
    values.append(at::full({2}, i, at::device(cuda(i % 2))));
    values.end_group();
    outs.append(at::zeros({2}, at::device(cuda(i % 2)).dtype(at::kLong)));
    outs.end_group();
  }
  store->init(keys, values);
  store->pull(keys, outs);
  store->push(keys, outs);
  counters() = {};
  store->pull(keys, outs);
  EXPECT_GT(counters().launches, 2);
  EXPECT_EQ(outs.flat[kMany - 1].cpu()[0].item<int64_t>(), kMany - 1);
}

TEST_F(LaunchesTest, NcclCarriesEveryKeyOnceEachWay) {
  const Model model(4, "nccl");
  model.step(); // makes nothing new, but the first one did
  const int before = mock_cuda::num_nccl_operations();
  counters() = {};
  model.step();
  EXPECT_EQ(mock_cuda::num_nccl_operations() - before, 2 * kNumKeys);
  EXPECT_EQ(counters().launches, 4); // the rule, on the home of each key
  EXPECT_EQ(counters().operators, 0);
  EXPECT_EQ(counters().allocations, 0);
  EXPECT_EQ(counters().synchronizations, 0);
  for (const auto& weight : model.weights.flat) {
    EXPECT_EQ(weight.cpu()[0].item<float>(), -4 - 6 - 7);
  }
}

TEST_F(LaunchesTest, WithoutPeersValuesAreCopiedHome) {
  mock_cuda::reset(4, mock_cuda::Topology::kNone);
  const Model model(4);
  model.step();
  EXPECT_EQ(counters().operators, kNumKeys * 3 * 2);
  EXPECT_EQ(counters().synchronizations, 0);
  for (const auto& weight : model.weights.flat) {
    EXPECT_EQ(weight.cpu()[0].item<float>(), -4 - 6);
  }
}

TEST_F(LaunchesTest, AnErrorOfCudaReachesTheCaller) {
  const Model model(1);
  testing::emulated_error() = 1;
  EXPECT_NE(
      refusal([&] { model.step(); }).find("CUDA error: an error of the mock"),
      std::string::npos);
  testing::emulated_error() = 0;
  EXPECT_EQ(refusal([&] { model.step(); }), "");
}

// A gradient is overwritten on its own device right after the push.
TEST_F(LaunchesTest, WithoutWaitsBetweenDevicesTheCheckerComplains) {
  mock_cuda::expect_waits_matter([](Runtime& runtime) {
    const auto store = c10::make_intrusive<KVStore>("device", runtime);
    store->init(3, at::zeros({4}, at::device(cuda(0))));
    const at::Tensor here = at::ones({4}, at::device(cuda(0)));
    const at::Tensor there = at::ones({4}, at::device(cuda(1)));
    store->push(3, Tensors::replicas({here, there}));
    there.fill_(2);
    store->pull(3, Tensors::replicas({here, there}));
    there.add_(1);
  });
}

} // namespace
} // namespace torchkv

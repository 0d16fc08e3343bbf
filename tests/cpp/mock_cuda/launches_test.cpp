// A store's use of CUDA in a steady state: launches, events, memory and NCCL.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <utility>
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
using mock_cuda::pull_async;
using mock_cuda::push_async;
using mock_cuda::refusal;
using mock_cuda::StorePtr;

constexpr int kManyKeys = 50;

Keys many_keys() {
  return mock_cuda::first_keys(kManyKeys);
}

// A tensor for each key on each device.
Tensors tensors_on(int num_devices, double value) {
  Tensors result;
  for (int i = 0; i < kManyKeys; ++i) {
    for (int d = 0; d < num_devices; ++d) {
      result.append(at::full({i + 1}, value, at::device(cuda(d))));
    }
    result.end_group();
  }
  return result;
}

// A model with momentum on the store, after its first step.
struct MomentumModel {
  explicit MomentumModel(int num_devices, const char* type = "device")
      : store(c10::make_intrusive<KVStore>(type)),
        gradients(tensors_on(num_devices, 1)),
        weights(tensors_on(num_devices, 0)) {
    Tensors values;
    for (int i = 0; i < kManyKeys; ++i) {
      values.append(at::zeros({i + 1}));
      values.end_group();
    }
    store->init(many_keys(), values);
    Optimizer optimizer;
    optimizer.groups.push_back(
        make_rule("test", "sgd", {{"lr", 1}, {"momentum", 0.5}}));
    store->set_optimizer(optimizer);
    step();
    counters() = {};
  }

  void step() const {
    store->push(many_keys(), gradients);
    store->pull(many_keys(), weights);
  }

  StorePtr store;
  Tensors gradients;
  Tensors weights;
};

using LaunchesTest = mock_cuda::DevicesTest;

TEST_F(LaunchesTest, OneDeviceTakesOneLaunchEachWay) {
  const MomentumModel model(1);
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

// Each stream of a caller records one event before the work and one after it.
// One home waits for all others, and they for it, before and after the work:
// with N streams, each needs at least 2 (N - 1) waits to wait for all others.
TEST_F(LaunchesTest, EveryDeviceTakesOneLaunchEachWay) {
  for (const int num_devices : {2, 4, 8}) {
    mock_cuda::reset(8);
    const MomentumModel model(num_devices);
    model.step();
    EXPECT_EQ(counters().launches, 2 * num_devices);
    EXPECT_EQ(counters().operators, 0);
    EXPECT_EQ(counters().allocations, 0);
    const int64_t num_hubs = num_devices > 2 ? 2 : 0;
    EXPECT_EQ(counters().records, 2 * (2 * num_devices + num_hubs));
    EXPECT_EQ(counters().waits, 2 * 4 * (num_devices - 1));
    EXPECT_EQ(counters().synchronizations, 0);
  }
}

TEST_F(LaunchesTest, ANormTakesAFewLaunchesOnEachDevice) {
  constexpr int kMany = 161;
  const Keys keys = mock_cuda::first_keys(kMany);
  for (const int num_devices : {1, 4}) {
    mock_cuda::reset(8);
    const auto store = c10::make_intrusive<KVStore>("device");
    Tensors gradients;
    Tensors values;
    for (int i = 0; i < kMany; ++i) {
      for (int d = 0; d < num_devices; ++d) {
        gradients.append(at::full({i + 1}, 1.F, at::device(cuda(d))));
      }
      gradients.end_group();
      values.append(at::zeros({i + 1}));
      values.end_group();
    }
    store->init(keys, values);
    Optimizer optimizer;
    optimizer.groups.push_back(make_rule("test", "sgd", {{"lr", 1}}));
    optimizer.gradient.max_norm = 1;
    store->set_optimizer(optimizer);
    store->push(keys, gradients);
    counters() = {};
    store->push(keys, gradients);
    EXPECT_EQ(counters().launches, 2 * num_devices); // the norm and the step
    // A sum of squares, and what brings it to the host.
    EXPECT_LE(counters().operators, 3 * num_devices);
    EXPECT_NEAR(
        *store->grad_norm(),
        num_devices * std::sqrt(kMany * (kMany + 1) / 2.0),
        1e-9);
  }
}

TEST_F(LaunchesTest, AStepWithNormsTakesThreeLaunches) {
  const std::vector<std::pair<const char*, NumbersByName>> rules{
      {"lamb", {}},
      {"mxnet_lamb", {}},
      {"mxnet_lars", {}},
      {"mxnet_lbsgd", {{"warmup_strategy", 3}}}};
  for (const auto& [rule, numbers] : rules) {
    mock_cuda::reset(8);
    const MomentumModel model(2);
    Optimizer optimizer;
    optimizer.groups.push_back(make_rule("test", rule, numbers));
    model.store->set_optimizer(optimizer);
    model.step();
    counters() = {};
    model.store->push(many_keys(), model.gradients);
    // Whole values, on both devices.
    EXPECT_EQ(counters().launches, 3 * 2) << rule;
    EXPECT_EQ(counters().operators, 0) << rule;
    EXPECT_EQ(counters().allocations, 2) << rule;
    EXPECT_EQ(counters().synchronizations, 0) << rule;
  }
}

TEST_F(LaunchesTest, OutOfMemoryForNormsChangesNothing) {
  const MomentumModel model(2);
  const MomentumModel other(2);
  Optimizer optimizer;
  optimizer.groups.push_back(make_rule("test", "lamb", {{"lr", 0.5}}));
  for (const auto* each : {&model, &other}) {
    each->store->set_optimizer(optimizer);
    each->step();
  }
  const auto expect_same = [&] {
    const auto actual = model.store->pull(many_keys());
    const auto expected = other.store->pull(many_keys());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(at::equal(actual[i].cpu(), expected[i].cpu())) << i;
    }
  };
  for (const int num_left : {0, 1}) { // each device has a block
    mock_cuda::allocations_left() = num_left;
    EXPECT_THROW(
        model.store->push(many_keys(), model.gradients), c10::OutOfMemoryError);
    mock_cuda::allocations_left() = -1;
    expect_same();
  }
  // Nor has the state changed, or the count of steps.
  model.store->push(many_keys(), model.gradients);
  other.store->push(many_keys(), other.gradients);
  expect_same();
}

// Enqueued work does not block, however large.
TEST_F(LaunchesTest, LargeValuesTakeOneLaunchTogether) {
  static int num_launches = 0;
  kernels::cuda::Table counting = mock_cuda::table();
  counting.launch_copy = [](kernels::cuda::Launch) {
    ++num_launches;
    return 0;
  };
  kernels::cuda::set_table(&counting);
  const auto store = c10::make_intrusive<KVStore>("device");
  // Together more than the CPU works on at a time.
  const auto values = [] {
    return at::empty({int64_t{40} * 1000 * 1000}, at::device(cuda(0)));
  };
  const Tensors tensors = Tensors::one_each({values(), values()});
  store->init({1, 2}, tensors);
  num_launches = 0;
  store->push({1, 2}, tensors);
  EXPECT_EQ(num_launches, 1);
  store->pull({1, 2}, tensors);
  EXPECT_EQ(num_launches, 2);
  kernels::cuda::set_table(&mock_cuda::table());
}

TEST_F(LaunchesTest, PeersAreQueriedOncePerProcess) {
  static int num_questions = 0;
  kernels::cuda::Table counting = mock_cuda::table();
  counting.enable_peer = [](int device, int peer) {
    ++num_questions;
    return mock_cuda::table().enable_peer(device, peer);
  };
  kernels::cuda::set_table(&counting);
  num_questions = 0;
  for (int i = 0; i < 2; ++i) { // stores
    const MomentumModel model(4);
    model.step();
  }
  EXPECT_EQ(num_questions, 4 * 3);
  kernels::cuda::set_table(&mock_cuda::table());
}

// A context takes hundreds of megabytes.
TEST_F(LaunchesTest, AnUnusedDeviceGetsNoContext) {
  for (const bool is_async : {false, true}) {
    mock_cuda::reset(3);
    const auto store = c10::make_intrusive<KVStore>("device");
    std::vector<at::Tensor> values;
    for (const int d : {1, 2}) {
      values.push_back(at::ones({4}, at::device(cuda(d))));
    }
    const Tensors tensors = Tensors::replicas(values);
    const std::string said = refusal([&] {
      store->init(3, values[0]);
      if (is_async) {
        push_async(*store, 3, tensors)->wait();
        pull_async(*store, 3, tensors)->wait();
      } else {
        store->push(3, tensors);
        store->pull(3, tensors);
      }
    });
    EXPECT_EQ(said, "");
    EXPECT_EQ(values[1].cpu()[0].item<float>(), 2);
  }
}

// Of the sum before it is rounded to the stored dtype.
TEST_F(LaunchesTest, ANormMatchesTheCpu) {
  at::manual_seed(0);
  for (const auto dtype :
       {at::kFloat, at::kBFloat16, at::kDouble, at::kComplexFloat}) {
    const at::Tensor first = at::randn({9000}).to(dtype);
    const at::Tensor second = at::randn({9000}).to(dtype);
    const auto norm_on = [&](c10::Device device) {
      const auto store = c10::make_intrusive<KVStore>("device");
      store->init(3, first.to(device));
      Optimizer optimizer;
      optimizer.groups.push_back(make_rule("test", "sgd", {{"lr", 1}}));
      optimizer.gradient.max_norm = 1;
      optimizer.gradient.clip_value = 1.5;
      store->set_optimizer(optimizer);
      store->push(3, Tensors::replicas({first.to(device), second.to(device)}));
      return *store->grad_norm();
    };
    const double expected = norm_on(c10::kCPU);
    counters() = {};
    EXPECT_NEAR(norm_on(cuda(0)), expected, 1e-12 * expected) << dtype;
    EXPECT_EQ(counters().launches, 2) << dtype; // the norm and the step
  }
}

// PyTorch's operators do the work on a GPU that is older than the kernels.
TEST_F(LaunchesTest, ADeviceWithoutCodeHasNoLaunches) {
  for (const bool has_code : {true, false}) {
    mock_cuda::reset(4);
    mock_cuda::set_has_code(1, has_code);
    kernels::cuda::set_table(&mock_cuda::table()); // refreshes the cache
    const MomentumModel model(2);
    model.step();
    EXPECT_EQ(counters().launches, has_code ? 4 : 2);
    EXPECT_EQ(counters().operators == 0, has_code);
    for (const auto& weight : model.weights.flat) {
      EXPECT_EQ(weight.cpu()[0].item<float>(), -2 - 3);
    }
  }
}

TEST_F(LaunchesTest, ANormWithoutCode) {
  mock_cuda::set_has_code(0, false);
  kernels::cuda::set_table(&mock_cuda::table());
  const auto store = c10::make_intrusive<KVStore>("device");
  const auto value = at::full({4}, 3.F, at::device(cuda(0)));
  store->init(3, value);
  Optimizer optimizer;
  optimizer.groups.push_back(make_rule("test", "sgd", {{"lr", 1}}));
  optimizer.gradient.max_norm = 1;
  store->set_optimizer(optimizer);
  store->push(3, value);
  EXPECT_EQ(counters().launches, 0);
  EXPECT_DOUBLE_EQ(*store->grad_norm(), 6);
}

// Broken IOMMUs misdirect peer accesses.
TEST_F(LaunchesTest, WithoutDirectAccessEverythingGoesThroughTheHost) {
  for (const bool has_kernels : {true, false}) {
    for (const bool is_direct : {true, false}) {
      mock_cuda::reset(2);
      kernels::cuda::set_table(has_kernels ? &mock_cuda::table() : nullptr);
      setenv("TORCHKV_P2P", is_direct ? "1" : "0", 1);
      const MomentumModel model(2);
      model.step();
      EXPECT_EQ(mock_cuda::has_any_peer_access(), is_direct);
      for (const auto& weight : model.weights.flat) {
        EXPECT_EQ(weight.cpu()[0].item<float>(), -2 - 3);
      }
    }
  }
  unsetenv("TORCHKV_P2P");
}

// Full launches are issued while another device is current.
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

TEST_F(LaunchesTest, NcclMovesEveryKeyOnceEachWay) {
  const MomentumModel model(4, "nccl");
  model.step(); // the first step allocates
  const int before = mock_cuda::num_nccl_operations();
  counters() = {};
  model.step();
  EXPECT_EQ(mock_cuda::num_nccl_operations() - before, 2 * kManyKeys);
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
  const MomentumModel model(4);
  model.step();
  EXPECT_EQ(counters().operators, kManyKeys * 3 * 2);
  EXPECT_EQ(counters().synchronizations, 0);
  for (const auto& weight : model.weights.flat) {
    EXPECT_EQ(weight.cpu()[0].item<float>(), -4 - 6);
  }
}

// The source's stream waits for the destination's, as in a direct copy.
TEST_F(LaunchesTest, WithoutDirectAccessCopiesAreOrdered) {
  setenv("TORCHKV_P2P", "0", 1);
  const auto store = c10::make_intrusive<KVStore>("device");
  std::vector<at::Tensor> values;
  for (const int d : {0, 1}) {
    values.push_back(at::ones({1 << 20}, at::device(cuda(d))));
  }
  store->init(3, values[0]);
  store->push(3, Tensors::replicas(values)); // shards it
  // Of another dtype: it is gathered before it is converted.
  const at::Tensor out =
      at::zeros({1 << 20}, at::device(cuda(0)).dtype(at::kDouble));
  const std::string said = refusal([&] {
    const WorkPtr work = push_async(*store, 3, Tensors::replicas(values));
    store->pull(3, out); // beside the push
    work->wait();
  });
  EXPECT_TRUE(at::equal(out.cpu(), at::full({1 << 20}, 2., at::kDouble)));
  EXPECT_EQ(said, "");
  unsetenv("TORCHKV_P2P");
}

TEST_F(LaunchesTest, AnErrorOfCudaReachesTheCaller) {
  const MomentumModel model(1);
  testing::emulated_error() = 1;
  EXPECT_NE(
      refusal([&] { model.step(); }).find("CUDA error: an error of the mock"),
      std::string::npos);
  testing::emulated_error() = 0;
  EXPECT_EQ(refusal([&] { model.step(); }), "");
}

// A gradient is overwritten on its own device right after the push.
TEST_F(LaunchesTest, MissingWaitsBetweenDevicesAreDetected) {
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

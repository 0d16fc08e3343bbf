// The store on fake GPUs: results, and the order of all work.
#include "kvstore.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "broken_runtime.h"
#include "devices_test.h"
#include "kernels/cuda/library.h"
#include "stores.h"
#include "update/script_updater.h"

namespace torchkv {
namespace {

using mock_cuda::AddTwice;
using mock_cuda::BrokenRuntime;
using mock_cuda::Carrier;
using mock_cuda::cuda;
using mock_cuda::expect_full;
using mock_cuda::full;
using mock_cuda::make_optimizer;
using mock_cuda::make_store;
using mock_cuda::new_stream;
using mock_cuda::refusal;
using mock_cuda::StorePtr;

// With 2, 4 and 8 devices, of every topology.
struct Machine {
  int num_devices;
  mock_cuda::Topology topology;
};

class KVStoreDevicesTest
    : public mock_cuda::DevicesTest,
      public ::testing::WithParamInterface<std::tuple<Machine, Carrier>> {
 protected:
  KVStoreDevicesTest() {
    const Machine& machine = std::get<0>(GetParam());
    mock_cuda::reset(machine.num_devices, machine.topology);
    if (std::get<1>(GetParam()) == Carrier::kOperators) {
      kernels::cuda::set_table(nullptr);
    }
  }

  static StorePtr make_store() {
    const bool nccl = std::get<1>(GetParam()) == Carrier::kNccl;
    return mock_cuda::make_store(nccl ? "nccl" : "device");
  }

  static int num_devices() {
    return std::get<0>(GetParam()).num_devices;
  }
  // One tensor on each device: first, first + 1, ...
  std::vector<at::Tensor> replicas(double first) const {
    std::vector<at::Tensor> result;
    for (int i = 0; i < num_devices(); ++i) {
      result.push_back(full(first + i, cuda(i)));
    }
    return result;
  }
  double sum_of_replicas(double first) const {
    return num_devices() * first + num_devices() * (num_devices() - 1) / 2.0;
  }
  void expect_all(const std::vector<at::Tensor>& tensors, double value) const {
    for (int i = 0; i < num_devices(); ++i) {
      EXPECT_EQ(tensors[static_cast<size_t>(i)].device(), cuda(i));
      expect_full(tensors[static_cast<size_t>(i)], value);
    }
  }
};

TEST_P(KVStoreDevicesTest, SumsReplicasAndFillsAll) {
  for (const auto home : {c10::Device(c10::kCPU), cuda(num_devices() - 1)}) {
    const auto store = make_store();
    store->init(3, full(2, home));
    const auto outs = replicas(0);
    store->pull(3, Tensors::replicas(outs));
    expect_all(outs, 2);
    store->push(3, Tensors::replicas(replicas(1)));
    store->pull(3, Tensors::replicas(outs));
    expect_all(outs, sum_of_replicas(1));
    const at::Tensor on_cpu = full(0);
    store->pull(3, on_cpu);
    expect_full(on_cpu, sum_of_replicas(1));
  }
}

TEST_P(KVStoreDevicesTest, PushpullAndBroadcast) {
  const auto store = make_store();
  const auto outs = replicas(0);
  store->broadcast("w", full(5, cuda(0)), Tensors::replicas(outs));
  expect_all(outs, 5);
  store->pushpull("w", Tensors::replicas(replicas(2)), Tensors::replicas(outs));
  expect_all(outs, sum_of_replicas(2));
  // Into the pushed tensors themselves.
  store->pushpull("w", Tensors::replicas(outs), Tensors::replicas(outs));
  expect_all(outs, num_devices() * sum_of_replicas(2));
}

TEST_P(KVStoreDevicesTest, ALocalStoreStaysInCpuMemory) {
  const auto store = c10::make_intrusive<KVStore>("local");
  store->init(3, full(1, cuda(0)));
  store->set_optimizer(make_optimizer("sgd"));
  const auto outs = replicas(0);
  store->pushpull(3, Tensors::replicas(replicas(1)), Tensors::replicas(outs));
  expect_all(outs, 1 - sum_of_replicas(1));
  EXPECT_TRUE(store->pull(3)[0].is_cpu());
}

TEST_P(KVStoreDevicesTest, KeysWithHomesOnAllDevices) {
  const auto store = make_store();
  const Keys keys = mock_cuda::first_keys(num_devices());
  Tensors values;
  for (int i = 0; i < num_devices(); ++i) {
    store->init(i, full(0, cuda(i)));
    for (const auto& value : replicas(i)) {
      values.append(value);
    }
    values.end_group();
  }
  store->push(keys, values);
  const auto pulled = store->pull(keys);
  for (int i = 0; i < num_devices(); ++i) {
    EXPECT_EQ(pulled[static_cast<size_t>(i)].device(), cuda(i));
    expect_full(pulled[static_cast<size_t>(i)], sum_of_replicas(i));
  }
}

TEST_P(KVStoreDevicesTest, OpaqueUpdater) {
  const auto store = make_store();
  store->init(3, full(1, cuda(num_devices() - 1)));
  store->set_updater(std::make_shared<AddTwice>());
  const auto outs = replicas(0);
  for (int i = 0; i < 3; ++i) {
    store->pushpull(3, Tensors::replicas(replicas(1)), Tensors::replicas(outs));
  }
  expect_all(outs, 1 + 6 * sum_of_replicas(1));
}

// Freeing and overwriting a pushed tensor is ordered after the store's reads.
TEST_P(KVStoreDevicesTest, GradientsMayBeFreedAndOverwrittenAfterPush) {
  const auto store = make_store();
  store->init(3, full(0, cuda(0)));
  auto values = replicas(1);
  store->push(3, Tensors::replicas(values));
  for (auto& value : values) {
    value.fill_(100);
  }
  const auto outs = replicas(0);
  store->pull(3, Tensors::replicas(outs));
  store->push(3, Tensors::replicas(std::exchange(values, {})));
  for (const auto& value : replicas(-1)) { // reuses freed memory
    EXPECT_EQ(refusal([&] { value.add_(1); }), "");
  }
  expect_all(outs, sum_of_replicas(1));
  for (auto& out : replicas(0)) {
    store->pull(3, out);
    expect_full(out, 100 * num_devices());
  }
}

TEST_P(KVStoreDevicesTest, EveryDeviceOnItsOwnStream) {
  const auto store = make_store();
  store->init(3, full(0, cuda(0)));
  const at::Tensor pulled = full(0, cuda(0));
  for (int round = 0; round < 3; ++round) {
    std::vector<c10::Stream> streams;
    for (int i = 0; i < num_devices(); ++i) {
      streams.push_back(new_stream(cuda(i)));
    }
    const c10::MultiStreamGuard guard(streams);
    const auto outs = replicas(0);
    store->pushpull(
        3, Tensors::replicas(replicas(round)), Tensors::replicas(outs));
    expect_all(outs, sum_of_replicas(round));
  }
  store->pull(3, pulled);
  expect_full(pulled, sum_of_replicas(2));
}

INSTANTIATE_TEST_SUITE_P(
    Machines,
    KVStoreDevicesTest,
    ::testing::Combine(
        ::testing::Values(
            Machine{2, mock_cuda::Topology::kAll},
            Machine{4, mock_cuda::Topology::kAll},
            Machine{4, mock_cuda::Topology::kPairs},
            Machine{4, mock_cuda::Topology::kNone},
            Machine{8, mock_cuda::Topology::kPairs},
            Machine{8, mock_cuda::Topology::kAll}),
        ::testing::Values(
            Carrier::kOperators,
            Carrier::kKernels,
            Carrier::kNccl)));

using KVStoreStreamsTest = mock_cuda::DevicesTest;

TEST_F(KVStoreStreamsTest, SumsAreBitwiseThoseOfTheCpu) {
  const auto sum = [](c10::ScalarType dtype,
                      c10::ScalarType pushed,
                      bool on_cpu) {
    const auto value = [&](int i, c10::ScalarType value_dtype) {
      const at::Tensor numbers =
          (at::arange(24, at::kDouble) * 0.7 + i).view({4, 6}).to(value_dtype);
      return numbers.to(on_cpu ? c10::Device(c10::kCPU) : cuda(i));
    };
    const auto store = make_store();
    store->init(3, value(0, dtype).t());
    store->push(
        3,
        Tensors::replicas(
            {value(0, pushed).t(),
             value(1, pushed).t().contiguous(),
             value(2, dtype).t()}));
    return store->pull(3)[0].cpu();
  };
  for (const auto dtype :
       {at::kFloat,
        at::kDouble,
        at::kHalf,
        at::kBFloat16,
        at::kFloat8_e4m3fn,
        at::kComplexFloat,
        at::kLong,
        at::kByte,
        at::kUInt32,
        at::kBool}) {
    for (const auto pushed : {dtype, at::kBool}) {
      const at::Tensor expected = sum(dtype, pushed, /*on_cpu=*/true);
      const at::Tensor result = sum(dtype, pushed, /*on_cpu=*/false);
      EXPECT_EQ(result.strides(), expected.strides()) << dtype;
      EXPECT_TRUE(
          at::equal(
              result.contiguous().view(at::kByte),
              expected.contiguous().view(at::kByte)))
          << dtype;
    }
  }
}

// A stored tensor may be freed on another stream than its last use.
TEST_F(KVStoreStreamsTest, KeysAreFreedOnAnyStream) {
  const auto on_a_new_stream = [](const auto& call) {
    const c10::StreamGuard guard(new_stream(cuda(0)));
    return refusal(call);
  };
  const auto store = make_store();
  store->init({1, 2}, Tensors::one_each({full(1, cuda(0)), full(2, cuda(0))}));
  on_a_new_stream([&] { store->set_updater(std::make_shared<AddTwice>()); });
  for (int i = 0; i < 2; ++i) {
    on_a_new_stream([&] {
      store->push(
          {1, 2}, Tensors::one_each({full(1, cuda(0)), full(2, cuda(1))}));
    });
  }
  EXPECT_EQ(on_a_new_stream([&] { store->erase(1); }), "");
  store->set_updater(nullptr); // no other can be copied
  const auto copy = KVStore::from_state(store->state());
  EXPECT_EQ(on_a_new_stream([&] { store->take(*copy); }), "");
  EXPECT_EQ(on_a_new_stream([&] { store->close(); }), "");
}

TEST_F(KVStoreStreamsTest, OptimizerStateFollowsTheStreams) {
  const auto store = make_store();
  store->init(3, full(1, cuda(0)));
  const auto push = [&] { store->push(3, full(1, cuda(0))); };
  const auto on_a_new_stream = [&](const auto& call) {
    const c10::StreamGuard guard(new_stream(cuda(0)));
    call();
  };
  store->set_optimizer(make_optimizer("adam"));
  push();
  on_a_new_stream(push);
  on_a_new_stream([&] {
    const auto states = store->optimizer_states(3);
    push();
    store->set_optimizer_states(3, states);
  });
  on_a_new_stream([&] { store->state(); });
  on_a_new_stream(push);
  // Frees the state, from another stream than the last.
  on_a_new_stream([&] { store->set_optimizer(make_optimizer("sgd")); });
  push();
  on_a_new_stream([&] { store->set_updater(nullptr); });
  on_a_new_stream(push);
  EXPECT_EQ(refusal([&] { store->erase(3); }), "");
}

TEST_F(KVStoreStreamsTest, AccumulatedGradientsFollowTheStreams) {
  const auto store = make_store();
  store->init(3, full(1, cuda(0)));
  Optimizer optimizer = make_optimizer("sgd");
  optimizer.gradient.accumulate = 3;
  store->set_optimizer(optimizer);
  for (int i = 0; i < 6; ++i) {
    const c10::StreamGuard guard(new_stream(cuda(0)));
    store->push(3, full(1, cuda(0)));
  }
  expect_full(store->pull(3)[0], -5);
}

TEST_F(KVStoreStreamsTest, AValueMovesToTheFirstDeviceWithItsState) {
  const auto store = make_store();
  store->init(3, full(1));
  store->set_optimizer(make_optimizer("adam"));
  store->push(3, full(1));
  store->push(3, full(1, cuda(2)));
  EXPECT_EQ(store->pull(3)[0].device(), cuda(2));
  const auto states = store->optimizer_states(3);
  for (const auto& [name, tensor] : states[0].tensors) {
    EXPECT_EQ(tensor.device(), cuda(2)) << name;
  }
}

TEST_F(KVStoreStreamsTest, TorchScriptUpdater) {
  torch::jit::Module module("Momentum");
  module.register_attribute(
      "m",
      c10::DictType::create(c10::IntType::get(), c10::TensorType::get()),
      c10::impl::GenericDict(c10::IntType::get(), c10::TensorType::get()));
  module.define(R"(
    def forward(self, key: int, input: Tensor, stored: Tensor):
        if key in self.m:
            self.m[key] = self.m[key] * 0.5 + input
        else:
            self.m[key] = input
        stored -= self.m[key]
  )");
  const auto store = make_store();
  store->init(1, full(0, cuda(1)));
  store->set_updater(std::make_shared<ScriptUpdater>(module));
  for (int i = 0; i < 2; ++i) {
    store->push(1, Tensors::replicas({full(1, cuda(0)), full(3, cuda(1))}));
  }
  expect_full(store->pull(1)[0], -10); // -4, then -(4 * 0.5 + 4)
}

// State of an updater is freed on the stream that made it.
TEST_F(KVStoreStreamsTest, AnUpdatersStateFollowsTheStreams) {
  torch::jit::Module module("Momentum");
  module.register_attribute("m", c10::TensorType::get(), full(0, cuda(1)));
  module.define(R"(
    def forward(self, key: int, input: Tensor, stored: Tensor):
        self.m = self.m * 0.5 + input
        stored -= self.m
  )");
  const auto store = make_store();
  store->init({1, 2}, Tensors::one_each({full(0, cuda(1)), full(0, cuda(1))}));
  store->set_updater(std::make_shared<ScriptUpdater>(module));
  store->push(1, full(1, cuda(1)));
  for (int i = 0; i < 4; ++i) {
    const c10::StreamGuard guard(new_stream(cuda(1)));
    EXPECT_EQ(
        refusal([&] {
          store->push(1 + i % 2, full(1, cuda(1)));
          store->pull(1 + i % 2);
        }),
        "");
  }
  expect_full(store->pull(1)[0], -1 - 1.5 - 1.875);
  expect_full(store->pull(2)[0], -1.75 - 1.9375);
}

TEST_F(KVStoreStreamsTest, ThreadsOnTheirOwnStreams) {
  const auto store = make_store();
  store->init({1, 2}, Tensors::one_each({full(0, cuda(0)), full(0, cuda(1))}));
  store->set_updater(std::make_shared<AddTwice>());
  constexpr int kThreads = 4;
  constexpr int kPushes = 8;
  std::vector<std::string> said(kThreads);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (auto& text : said) {
    threads.emplace_back([&] {
      text = refusal([&] {
        const c10::MultiStreamGuard guard(
            std::vector<c10::Stream>{new_stream(cuda(0)), new_stream(cuda(1))});
        for (int i = 0; i < kPushes; ++i) {
          store->push(
              {1, 2},
              {{{full(1, cuda(0)), full(2, cuda(1))}, {full(3, cuda(0))}}});
          store->pull({2, 1});
        }
      });
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(said, std::vector<std::string>(kThreads));
  expect_full(store->pull(1)[0], 2 * 3 * kThreads * kPushes);
  expect_full(store->pull(2)[0], 2 * 3 * kThreads * kPushes);
}

TEST_F(KVStoreStreamsTest, OneStreamNeverBlocksTheHost) {
  const auto store = make_store();
  store->init(3, full(1, cuda(0)));
  store->set_optimizer(make_optimizer("adam"));
  const at::Tensor value = full(1, cuda(0));
  const at::Tensor other = full(1, cuda(1));
  mock_cuda::counters() = {};
  for (int i = 0; i < 3; ++i) {
    store->pushpull(
        3,
        Tensors::replicas({value, other}),
        Tensors::replicas({value, other}));
  }
  EXPECT_EQ(mock_cuda::counters().synchronizations, 0);
}

// --- The checker detects defects of the store
// --------------------------------

// A key in memory of the first of two streams that use it.
std::string use_from_two_streams(Runtime& runtime) {
  return refusal([&] {
    const auto store = c10::make_intrusive<KVStore>("device", runtime);
    store->init(3, full(1, cuda(0)));
    const c10::StreamGuard guard(new_stream(cuda(0)));
    store->push(3, full(2, cuda(0)));
  });
}

TEST_F(KVStoreStreamsTest, AMissingWaitIsDetected) {
  BrokenRuntime runtime;
  EXPECT_EQ(use_from_two_streams(runtime), "");
  runtime.waits = false;
  EXPECT_NE(
      use_from_two_streams(runtime).find("nothing orders the two"),
      std::string::npos);
}

TEST_F(KVStoreStreamsTest, MemoryThatIsNotKeptIsDetected) {
  BrokenRuntime runtime;
  runtime.keeps = false;
  EXPECT_NE(
      use_from_two_streams(runtime).find("was freed while"), std::string::npos);
}

} // namespace
} // namespace torchkv

// Values sharded over fake GPUs: results, and the order of all work.
#include "memory/slices.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "devices_test.h"
#include "kernels/cuda/library.h"
#include "kvstore.h"
#include "optimizer_helpers.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::AddTwice;
using mock_cuda::counters;
using mock_cuda::cuda;
using mock_cuda::make_store;
using mock_cuda::new_stream;
using mock_cuda::PlacesOfEnvironment;
using mock_cuda::StorePtr;
using testing::optimizer;

struct ShardedMachine {
  const char* name;
  const char* type;
  int num_devices;
  mock_cuda::Topology topology;
  bool has_kernels;
  const char* places; // "" = the devices
};

void PrintTo(const ShardedMachine& machine, std::ostream* out) {
  *out << machine.name;
}

// Each operation runs on a store on fake GPUs and on one in CPU memory.
class ShardedTest : public mock_cuda::DevicesTest,
                    public ::testing::WithParamInterface<ShardedMachine> {
 protected:
  ShardedTest() : environment_(GetParam().places) {
    mock_cuda::reset(GetParam().num_devices, GetParam().topology);
    if (!GetParam().has_kernels) {
      kernels::cuda::set_table(nullptr);
    }
    store_ = make_store(GetParam().type);
  }
  ~ShardedTest() override {
    store_.reset(); // before the devices are checked
  }

  // Enough for each of 8 devices; not divisible by them.
  static at::Tensor random(c10::ScalarType dtype = at::kFloat) {
    return at::randint(-8, 8, {3, 190001}).to(dtype);
  }
  c10::Device device(size_t replica) const {
    if (replica == 3 && std::strstr(GetParam().places, "cpu") != nullptr) {
      return c10::kCPU;
    }
    return cuda(static_cast<int>(replica) % GetParam().num_devices);
  }
  size_t num_replicas() const {
    return GetParam().places[0] == 0
        ? static_cast<size_t>(GetParam().num_devices)
        : 4;
  }

  void init(const Key& key, const at::Tensor& value) {
    store_->init(key, value.to(device(0)));
    expected_->init(key, value);
  }
  void push(const Key& key, std::vector<at::Tensor> values) {
    expected_->push(key, Tensors::replicas(values));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = at::empty_like(values[i], device(i)).copy_(values[i]);
    }
    store_->push(key, Tensors::replicas(values));
    for (const auto& value : values) {
      value.zero_(); // the store has read it
    }
  }
  void push(const Key& key, c10::ScalarType dtype = at::kFloat) {
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < num_replicas(); ++i) {
      values.push_back(random(dtype));
    }
    push(key, std::move(values));
  }
  void expect_pulled(const Key& key, double tolerance = 0) {
    const at::Tensor expected = expected_->pull(key)[0];
    std::vector<at::Tensor> outs;
    for (size_t i = 0; i < num_replicas(); ++i) {
      outs.push_back(at::empty_like(expected, device(i)));
    }
    outs.push_back(at::empty_like(expected));
    outs.push_back(at::empty_like(expected.t(), device(1)).t());
    outs.push_back(
        at::empty_like(
            expected,
            at::device(device(0)).dtype(
                at::promoteTypes(expected.scalar_type(), at::kDouble))));
    store_->pull(key, Tensors::replicas(outs));
    outs.push_back(store_->pull(key)[0]);
    EXPECT_EQ(outs.back().device(), cuda(0)); // where it was initialised
    for (const auto& out : outs) {
      const at::Tensor result = out.cpu().to(expected.scalar_type());
      EXPECT_TRUE(
          tolerance == 0 ? at::equal(result, expected)
                         : at::allclose(result, expected, tolerance, tolerance))
          << "key " << key.context() << ' ' << out.device() << ' '
          << out.dtype() << " is off by "
          << (result - expected).abs().max().item<double>();
    }
  }

  PlacesOfEnvironment environment_;
  StorePtr expected_ = make_store("local");
  StorePtr store_;
};

TEST_P(ShardedTest, SumsAndCopiesOut) {
  for (const auto dtype :
       {at::kFloat, at::kHalf, at::kInt, at::kComplexFloat}) {
    const Key key(static_cast<int64_t>(dtype));
    init(key, random(dtype));
    expect_pulled(key);
    push(key, dtype);
    expect_pulled(key);
    push(key, dtype);
    expect_pulled(key);
  }
}

TEST_P(ShardedTest, SupportsAllKindsOfValues) {
  init(3, random());
  push(3);
  auto values = std::vector<at::Tensor>{
      random(),
      random().t().contiguous().t(),
      random(at::kHalf),
      at::randint(-8, 8, {3, 1}).to(at::kFloat).expand({3, 190001})};
  push(3, values);
  expect_pulled(3);
  std::vector<at::Tensor> mixed{random(), random().to(cuda(0)), random()};
  store_->push(3, Tensors::replicas(mixed));
  expected_->push(3, Tensors::replicas(mixed));
  expect_pulled(3);
}

TEST_P(ShardedTest, ManyKeysOfACallAreShardedTogether) {
  const Keys keys = mock_cuda::first_keys(20);
  Tensors values;
  Tensors outs;
  for (int64_t i = 0; i < 20; ++i) {
    const int64_t size = 1 + 31337 * i;
    store_->init(i, at::zeros({size}));
    for (size_t j = 0; j < num_replicas(); ++j) {
      values.append(at::full({size}, i + 1, at::device(device(j))));
      outs.append(at::empty({size}, at::device(device(j))));
    }
    values.end_group();
    outs.end_group();
  }
  for (int round = 0; round < 2; ++round) {
    store_->push(keys, values);
    store_->pull(keys, outs);
    for (size_t i = 0; i < outs.flat.size(); ++i) {
      const auto key = static_cast<double>(i / num_replicas());
      const auto sum = static_cast<double>(num_replicas()) * (key + 1);
      EXPECT_TRUE(outs.flat[i].cpu().eq(sum).all().item<bool>()) << i;
    }
  }
}

TEST_P(ShardedTest, OptimizersStepAndKeepTheirState) {
  for (const auto* rule : {"sgd", "adam", "lamb"}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const Optimizer made = optimizer(
          rule,
          rule == std::string("sgd") ? NumbersByName{{"momentum", 0.5}}
                                     : NumbersByName{{"lr", 0.1}},
          {{"accumulate", 2}, {"max_norm", 1}});
      const Key key(c10::str(rule, dtype));
      init(key, random(dtype));
      for (const auto& store : {store_, expected_}) {
        store->set_optimizer(made);
      }
      for (int i = 0; i < 5; ++i) {
        push(key);
      }
      // LAMB's norms are sums of 570,003 numbers, added in another order.
      const double in_fp32 = rule == std::string("lamb") ? 1e-4 : 1e-5;
      const double tolerance = dtype == at::kBFloat16 ? 1e-2 : in_fp32;
      expect_pulled(key, tolerance);
      const KeyState state = store_->optimizer_states(key)[0];
      const KeyState expected = expected_->optimizer_states(key)[0];
      EXPECT_EQ(state.step, expected.step);
      EXPECT_EQ(state.num_accumulated, 1);
      ASSERT_EQ(state.tensors.size(), expected.tensors.size());
      for (const auto& [name, tensor] : expected.tensors) {
        EXPECT_TRUE(
            at::allclose(
                state.tensors.at(name).cpu(), tensor, in_fp32, in_fp32))
            << name;
      }
      store_->set_optimizer_states(key, {state}); // back into the shards
      push(key);
      expect_pulled(key, tolerance);
    }
  }
}

TEST_P(ShardedTest, AnUpdaterGetsTheWholeAndItsKeyIsShardedAgain) {
  init(3, random());
  push(3); // sharded
  for (const auto& store : {store_, expected_}) {
    store->set_updater(std::make_shared<AddTwice>());
  }
  push(3); // whole
  expect_pulled(3);
  for (const auto& store : {store_, expected_}) {
    store->set_updater(nullptr);
  }
  push(3); // sharded again
  expect_pulled(3);
}

TEST_P(ShardedTest, StoresAreCopiedWhole) {
  init(3, random());
  push(3);
  const auto copy = KVStore::from_state(store_->state());
  EXPECT_TRUE(at::equal(copy->pull(3)[0].cpu(), expected_->pull(3)[0]));
}

TEST_P(ShardedTest, ThreadsOnTheirOwnStreams) {
  init(3, at::zeros({3, 190001}));
  for (const auto& store : {store_, expected_}) {
    store->set_optimizer(optimizer("sgd", {{"lr", 1}}));
  }
  const auto work = [&](double value) {
    std::vector<c10::Stream> streams;
    for (int i = 0; i < GetParam().num_devices; ++i) {
      streams.push_back(new_stream(cuda(i)));
    }
    const c10::MultiStreamGuard guard(streams);
    for (int round = 0; round < 3; ++round) {
      std::vector<at::Tensor> values;
      for (size_t i = 0; i < num_replicas(); ++i) {
        values.push_back(at::full({3, 190001}, value, at::device(device(i))));
      }
      store_->push(3, Tensors::replicas(values));
      store_->pull(3, Tensors::replicas(values));
    }
  };
  std::thread other(work, 2);
  work(1);
  other.join();
  const auto replicas = static_cast<double>(num_replicas());
  EXPECT_TRUE(store_->pull(3)[0].cpu().eq(-9 * replicas).all().item<bool>());
}

TEST_P(ShardedTest, ASteadyStateAllocatesNothing) {
  if (!GetParam().has_kernels ||
      GetParam().topology != mock_cuda::Topology::kAll || device(3).is_cpu()) {
    GTEST_SKIP() << "copies that are staged need memory";
  }
  store_->init(3, at::zeros({800000}));
  store_->set_optimizer(optimizer("adam", {}));
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < num_replicas(); ++i) {
    values.push_back(at::ones({800000}, at::device(device(i))));
  }
  const auto step = [&] {
    store_->push(3, Tensors::replicas(values));
    store_->pull(3, Tensors::replicas(values));
  };
  step();
  const auto before = counters();
  step();
  EXPECT_EQ(counters().allocations, before.allocations);
  EXPECT_EQ(counters().operators, before.operators);
  EXPECT_EQ(counters().synchronizations, before.synchronizations);
}

using mock_cuda::Topology;
INSTANTIATE_TEST_SUITE_P(
    Machines,
    ShardedTest,
    ::testing::Values(
        ShardedMachine{"two", "device", 2, Topology::kAll, true, ""},
        ShardedMachine{"four", "device", 4, Topology::kAll, true, ""},
        ShardedMachine{
            "four_in_pairs",
            "device",
            4,
            Topology::kPairs,
            true,
            ""},
        ShardedMachine{"four_apart", "device", 4, Topology::kNone, true, ""},
        ShardedMachine{"eight", "device", 8, Topology::kAll, true, ""},
        ShardedMachine{"operators", "device", 4, Topology::kAll, false, ""},
        ShardedMachine{"nccl", "nccl", 4, Topology::kAll, true, ""},
        ShardedMachine{"nccl_apart", "nccl", 8, Topology::kNone, true, ""},
        ShardedMachine{
            "logical",
            "device",
            1,
            Topology::kAll,
            true,
            "cuda:0,cuda:0,cuda:0,cuda:0"},
        ShardedMachine{
            "two_by_two",
            "device",
            2,
            Topology::kAll,
            true,
            "cuda:0,cuda:1,cuda:0,cuda:1"},
        ShardedMachine{
            "with_the_cpu",
            "device",
            1,
            Topology::kAll,
            true,
            "cuda:0,cuda:0,cpu"},
        ShardedMachine{
            "logical_operators",
            "device",
            1,
            Topology::kAll,
            false,
            "cuda:0,cuda:0,cuda:0,cuda:0"}),
    [](const auto& machine) { return machine.param.name; });

} // namespace
} // namespace torchkv

// Gradient compression of values on fake GPUs: results, and the order of all
// work.
#include "store/compression.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "devices_test.h"
#include "emulated_table.h"
#include "function_updater.h"
#include "kernels/cuda/library.h"
#include "kvstore.h"
#include "optimizer_helpers.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::cuda;
using mock_cuda::make_store;
using mock_cuda::new_stream;
using mock_cuda::StorePtr;
using testing::optimizer;

struct CompressingMachine {
  const char* name;
  const char* type;
  int num_devices;
  bool has_kernels;
  const char* places; // "" = the devices
};

void PrintTo(const CompressingMachine& machine, std::ostream* out) {
  *out << machine.name;
}

// Each operation runs on a store on fake GPUs and on one in CPU memory.
class CompressedDevicesTest
    : public mock_cuda::DevicesTest,
      public ::testing::WithParamInterface<CompressingMachine> {
 protected:
  CompressedDevicesTest() : environment_(GetParam().places) {
    mock_cuda::reset(GetParam().num_devices, mock_cuda::Topology::kPairs);
    if (!GetParam().has_kernels) {
      kernels::cuda::set_table(nullptr);
    }
    store_ = make_store(GetParam().type);
    at::manual_seed(0);
  }
  ~CompressedDevicesTest() override {
    store_.reset(); // before the devices are checked
  }

  // Sharded, of fp64 over all devices.
  static at::Tensor random(c10::ScalarType dtype = at::kFloat) {
    return at::randn({3, 25001}, at::kDouble).to(dtype);
  }
  c10::Device device(size_t replica) const {
    return cuda(static_cast<int>(replica) % GetParam().num_devices);
  }
  void compress(const char* name) {
    for (const auto& store : {store_, expected_}) {
      store->set_gradient_compression({{make_codec("test", name, {})}, {}});
    }
  }
  void init(const Key& key, const at::Tensor& value) {
    store_->init(key, value.to(device(0)));
    expected_->init(key, value);
  }
  void push(const Key& key, const std::vector<at::Tensor>& values) {
    expected_->push(key, Tensors::replicas(values));
    std::vector<at::Tensor> on_devices;
    on_devices.reserve(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      // Those after the first begin at an address that is not aligned.
      const auto offset = static_cast<int64_t>(i);
      const at::Tensor memory = at::empty(
          {offset + values[i].numel()}, values[i].options().device(device(i)));
      on_devices.push_back(
          memory.as_strided(values[i].sizes(), values[i].strides(), offset)
              .copy_(values[i]));
    }
    store_->push(key, Tensors::replicas(on_devices));
    for (const auto& value : on_devices) {
      value.zero_(); // the store has read it
    }
  }
  void push_some(const Key& key, c10::ScalarType dtype = at::kFloat) {
    push(key, {random(dtype), random(dtype), random(dtype)});
  }
  void expect_pulled(const Key& key, double tolerance = 0) {
    const at::Tensor expected = expected_->pull(key)[0];
    const at::Tensor out = at::empty_like(expected, device(1));
    store_->pull(key, out);
    const at::Tensor result = out.cpu();
    EXPECT_TRUE(
        tolerance == 0 ? at::equal(result, expected)
                       : at::allclose(result, expected, tolerance, tolerance))
        << key.context() << " is off by "
        << (result - expected).abs().max().item<double>();
  }

  mock_cuda::PlacesOfEnvironment environment_;
  StorePtr expected_ = make_store("device");
  StorePtr store_;
};

// Counts launches of the kernels while it lives.
class CountedLaunches {
 public:
  CountedLaunches() {
    given() = kernels::cuda::table();
    counts() = {};
    static kernels::cuda::Table counting;
    counting = *given();
    counting.launch_select_top = [](kernels::cuda::SelectTop call,
                                    void* stream) {
      ++counts().selected;
      return given()->launch_select_top(call, stream);
    };
    counting.launch_send = [](kernels::cuda::Send send, void* stream) {
      ++(send.packs ? counts().codes : counts().sums);
      return given()->launch_send(send, stream);
    };
    counting.launch_receive = [](kernels::cuda::Receive call, void* stream) {
      ++counts().received;
      return given()->launch_receive(call, stream);
    };
    kernels::cuda::set_table(&counting);
  }
  ~CountedLaunches() {
    kernels::cuda::set_table(given());
  }
  CountedLaunches(const CountedLaunches&) = delete;
  CountedLaunches& operator=(const CountedLaunches&) = delete;

  struct Counts {
    int selected = 0; // of topk
    int sums = 0; // of what is sent
    int codes = 0;
    int received = 0;
  };
  static Counts& counts() {
    static Counts counts;
    return counts;
  }

 private:
  static const kernels::cuda::Table*& given() {
    static const kernels::cuda::Table* given = nullptr;
    return given;
  }
};

constexpr auto kCodecs =
    {"1bit", "2bit", "fp16", "bf16", "fp8", "int4", "topk"};

TEST_P(CompressedDevicesTest, SumsWhatIsSent) {
  for (const auto* codec : kCodecs) {
    compress(codec);
    for (const auto dtype : {at::kFloat, at::kHalf, at::kDouble}) {
      const Key key(c10::str(codec, dtype));
      init(key, random(dtype));
      push_some(key, dtype);
      expect_pulled(key);
      push_some(key, dtype); // with residuals
      expect_pulled(key);
      push(key, {random(dtype).t().contiguous().t(), random(at::kBFloat16)});
      expect_pulled(key);
    }
  }
}

// More than one launch sends; some values share a device.
TEST_P(CompressedDevicesTest, SumsManyValuesOfSeveralDtypes) {
  for (const auto* codec : kCodecs) {
    const Key key(codec);
    compress(codec);
    init(key, random());
    for (int i = 0; i < 2; ++i) {
      std::vector<at::Tensor> values;
      for (int replica = 0; replica < 12; ++replica) {
        values.push_back(
            at::randn({3, 25001}).to(replica == 9 ? at::kHalf : at::kFloat));
      }
      push(key, values);
      expect_pulled(key);
    }
  }
}

TEST_P(CompressedDevicesTest, OneLaunchSendsTheValuesOfADevice) {
  if (!GetParam().has_kernels || GetParam().num_devices != 1) {
    GTEST_SKIP() << "of one device with kernels";
  }
  const CountedLaunches launches_of_kernels;
  compress("2bit");
  init(3, random(at::kBFloat16));
  testing::emulated_launches().clear();
  push_some(3, at::kBFloat16);
  expect_pulled(3);
  EXPECT_EQ(CountedLaunches::counts().sums, 1);
  EXPECT_EQ(CountedLaunches::counts().codes, 0);
  // A kernel rounds the sum of fp32, too.
  const auto& launches = testing::emulated_launches();
  EXPECT_TRUE(
      std::any_of(launches.begin(), launches.end(), [](const auto& launch) {
        return !launch.is_copy && launch.head.first_is_sum &&
            launch.head.num_values == 1;
      }));
}

TEST_P(CompressedDevicesTest, OneLaunchSelectsTheTopOfSeveralValues) {
  if (!GetParam().has_kernels || GetParam().num_devices != 1) {
    GTEST_SKIP() << "of one device with kernels";
  }
  const CountedLaunches launches_of_kernels;
  compress("topk");
  init(3, random());
  push_some(3);
  expect_pulled(3);
  EXPECT_EQ(CountedLaunches::counts().selected, 1);
  EXPECT_EQ(CountedLaunches::counts().sums, 1);
}

TEST_P(CompressedDevicesTest, CodesOfLargeValuesLeaveADevice) {
  if (!GetParam().has_kernels || GetParam().num_devices != 2) {
    GTEST_SKIP() << "of two devices with kernels";
  }
  compress("2bit");
  const auto& counts = CountedLaunches::counts();
  const auto push_counted = [&](const Key& key, const at::Tensor& model) {
    const CountedLaunches launches_of_kernels;
    std::vector<at::Tensor> values; // on devices 0, 1, 0, 1
    for (int i = 0; i < 4; ++i) {
      values.push_back(at::randn_like(model));
    }
    push(key, values);
    expect_pulled(key);
    return counts;
  };
  // Too small for codes: each value's sum.
  init(1, at::zeros({1000}));
  EXPECT_EQ(push_counted(1, at::zeros({1000})).codes, 0);
  EXPECT_EQ(counts.sums, 4);
  EXPECT_EQ(counts.received, 0);
  // On one device: its own values are dense.
  const at::Tensor whole = at::zeros({40000});
  init(2, whole);
  EXPECT_EQ(push_counted(2, whole).codes, 2);
  EXPECT_EQ(counts.sums, 2);
  EXPECT_EQ(counts.received, 1);
  // Sharded over both: all values leave their device.
  const at::Tensor sharded = at::zeros({300003});
  init(3, sharded);
  EXPECT_EQ(push_counted(3, sharded).codes, 4);
  EXPECT_EQ(counts.sums, 0);
  EXPECT_EQ(counts.received, 2);
  // There are none for topk: each value's sum leaves.
  compress("topk");
  init(4, whole);
  EXPECT_EQ(push_counted(4, whole).codes, 0);
  EXPECT_EQ(counts.sums, 4);
  EXPECT_EQ(counts.received, 0);
}

TEST_P(CompressedDevicesTest, UpdatersSeeTheSumOfCodes) {
  compress("int4");
  init(3, random());
  for (const auto& store : {store_, expected_}) {
    store->set_updater(
        testing::updater_of(
            [](const at::Tensor& input, const at::Tensor& stored) {
              stored.mul_(0.5).add_(input);
            }));
  }
  push_some(3);
  push_some(3);
  expect_pulled(3, 1e-6);
}

TEST_P(CompressedDevicesTest, AddsToWhatIsAccumulated) {
  compress("2bit");
  init(3, random());
  for (const auto& store : {store_, expected_}) {
    store->set_optimizer(optimizer("sgd", {{"lr", 0.1}}, {{"accumulate", 2}}));
  }
  for (int i = 0; i < 4; ++i) {
    push_some(3);
  }
  expect_pulled(3, GetParam().has_kernels ? 0 : 1e-6);
}

TEST_P(CompressedDevicesTest, StatsCountWhatIsPushed) {
  compress("2bit");
  init(3, random(at::kHalf));
  push_some(3, at::kHalf);
  EXPECT_EQ(store_->stats({3})[0].bytes_pushed, 3 * 75003 * 2);
}

TEST_P(CompressedDevicesTest, OptimizersStepWithWhatIsSent) {
  for (const auto* codec : kCodecs) {
    const Key key(codec);
    compress(codec);
    init(key, random());
    for (const auto& store : {store_, expected_}) {
      store->set_optimizer(optimizer(
          "sgd",
          {{"lr", 0.1}, {"momentum", 0.9}},
          {{"max_norm", 1}, {"accumulate", 2}}));
    }
    for (int i = 0; i < 4; ++i) {
      push_some(key);
    }
    expect_pulled(key, 1e-4);
  }
}

TEST_P(CompressedDevicesTest, ResidualsFollowTheValues) {
  compress("2bit");
  init(3, at::zeros({2, 3}));
  for (const auto& store : {store_, expected_}) {
    store->set_optimizer(optimizer("sgd", {{"lr", 1}}));
  }
  const at::Tensor part = at::full({2, 3}, 0.4);
  const auto push_from = [&](c10::Device first) {
    expected_->push(3, part);
    store_->push(3, part.to(first));
    expect_pulled(3);
  };
  push_from(c10::kCPU);
  push_from(cuda(GetParam().num_devices - 1));
  push_from(device(0));
  push_from(c10::kCPU);
  const c10::Stream other = new_stream(device(0));
  {
    const c10::StreamGuard guard(other);
    push_from(device(0));
  }
  push_from(device(0));
  const StorePtr copy = KVStore::from_state(store_->state());
  push_from(device(0));
  copy->push(3, part);
  EXPECT_TRUE(at::equal(copy->pull(3)[0].cpu(), expected_->pull(3)[0]));
}

TEST_P(CompressedDevicesTest, CannotBeCaptured) {
  init(3, random());
  compress("2bit");
  const at::Tensor value = random().to(device(0));
  const std::string error =
      mock_cuda::refusal_in_capture(device(0), [&] { store_->push(3, value); });
  EXPECT_NE(error.find("push: expected no capture"), std::string::npos)
      << error;
  expect_pulled(3);
}

INSTANTIATE_TEST_SUITE_P(
    Machines,
    CompressedDevicesTest,
    ::testing::Values(
        CompressingMachine{"one", "device", 1, true, ""},
        CompressingMachine{"two", "device", 2, true, ""},
        CompressingMachine{"operators", "device", 3, false, ""},
        CompressingMachine{"nccl", "nccl", 3, true, ""},
        CompressingMachine{
            "logical",
            "device",
            1,
            true,
            "cuda:0,cuda:0,cuda:0"}),
    [](const auto& machine) { return machine.param.name; });

} // namespace
} // namespace torchkv

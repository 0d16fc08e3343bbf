// Sparse values on fake GPUs: results, and the order of all work.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "devices_test.h"
#include "function_updater.h"
#include "kernels/cuda/library.h"
#include "kvstore.h"
#include "optimizer_helpers.h"
#include "rule_cases.h"
#include "stores.h"
#include "wrapped_runtime.h"

namespace torchkv {
namespace {

using mock_cuda::cuda;
using mock_cuda::make_store;
using mock_cuda::new_stream;
using mock_cuda::StorePtr;
using testing::optimizer;

struct RowMachine {
  const char* name;
  const char* type;
  int num_devices;
  bool has_kernels;
  const char* places; // "" = the devices
};

void PrintTo(const RowMachine& machine, std::ostream* out) {
  *out << machine.name;
}

// Each operation runs on a store on fake GPUs and on one in CPU memory.
class RowSparseDevicesTest : public mock_cuda::DevicesTest,
                             public ::testing::WithParamInterface<RowMachine> {
 protected:
  // Shards, of at least 256 KiB, begin and end within rows.
  static constexpr int64_t kRows = 4001;
  int64_t columns = 67;

  RowSparseDevicesTest() : environment_(GetParam().places) {
    mock_cuda::reset(GetParam().num_devices, mock_cuda::Topology::kPairs);
    if (!GetParam().has_kernels) {
      kernels::cuda::set_table(nullptr);
    }
    store_ = make_store(GetParam().type);
    at::manual_seed(0);
  }
  ~RowSparseDevicesTest() override {
    store_.reset(); // before the devices are checked
  }

  at::Tensor random(c10::ScalarType dtype = at::kFloat) const {
    return at::randint(-8, 8, {kRows, columns}).to(dtype);
  }
  c10::Device device(size_t replica) const {
    return cuda(static_cast<int>(replica) % GetParam().num_devices);
  }
  static at::Tensor sparse(
      const at::Tensor& ids,
      const at::Tensor& rows,
      c10::IntArrayRef sizes) {
    return at::_sparse_coo_tensor_with_dims_and_tensors(
        1,
        rows.dim() - 1,
        sizes,
        ids.unsqueeze(0),
        rows,
        rows.options().layout(c10::kSparse),
        /*is_coalesced=*/false);
  }
  // Unsorted and repeated rows, or sorted ones.
  at::Tensor random_rows(
      bool sorted,
      c10::ScalarType dtype = at::kFloat,
      bool whole = true) const { // numbers, whose sums are exact
    at::Tensor ids = at::randint(kRows, {600}, at::kLong);
    ids = sorted ? std::get<0>(at::_unique(ids))
                 : at::cat({ids, ids.slice(0, 0, 9)});
    const at::Tensor rows = whole ? random(dtype).slice(0, 0, ids.size(0))
                                  : at::randn({ids.size(0), columns});
    return sparse(ids, rows, {kRows, columns});
  }
  at::Tensor moved(const at::Tensor& value, size_t replica) const {
    const auto copy = [&](const at::Tensor& tensor) {
      return at::empty_like(tensor, device(replica)).copy_(tensor);
    };
    return value.is_sparse()
        ? sparse(
              copy(value._indices()[0]), copy(value._values()), value.sizes())
        : copy(value);
  }

  void init(const Key& key, const at::Tensor& value) {
    store_->init(key, moved(value, 0));
    expected_->init(key, value);
  }
  void push(const Key& key, const std::vector<at::Tensor>& values) {
    expected_->push(key, Tensors::replicas(values));
    std::vector<at::Tensor> on_devices;
    on_devices.reserve(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      on_devices.push_back(moved(values[i], i));
    }
    store_->push(key, Tensors::replicas(on_devices));
    for (const auto& value : on_devices) {
      if (value.is_sparse()) { // the store has read it
        value._values().zero_();
      } else {
        value.zero_();
      }
    }
  }
  void push_rows(const Key& key, c10::ScalarType dtype = at::kFloat) {
    push(
        key,
        {random_rows(/*sorted=*/false, dtype),
         random_rows(/*sorted=*/true, dtype),
         random_rows(/*sorted=*/false, dtype),
         random_rows(/*sorted=*/true, dtype)});
  }
  void expect_pulled(const Key& key, double tolerance = 0) {
    const at::Tensor expected = expected_->pull(key)[0].to_dense();
    const at::Tensor out = at::empty_like(expected, device(1));
    store_->pull(key, out);
    expect_close(out, expected, tolerance, key.context());
    const at::Tensor ids = at::randint(expected.size(0), {3, 50}, at::kInt);
    for (const auto at : {c10::Device(c10::kCPU), device(0), device(1)}) {
      const at::Tensor rows =
          at::empty({3, 50, columns}, expected.options().device(at));
      store_->row_sparse_pull(key, ids, rows);
      expect_close(
          rows, expected.index({ids.to(at::kLong)}), tolerance, key.context());
    }
  }
  static void expect_close(
      const at::Tensor& given,
      const at::Tensor& expected,
      double tolerance,
      const std::string& what) {
    const at::Tensor result = given.cpu();
    EXPECT_TRUE(
        tolerance == 0 ? at::equal(result, expected)
                       : at::allclose(result, expected, tolerance, tolerance))
        << what << ' ' << given.device() << " is off by "
        << (result - expected).abs().max().item<double>();
  }

  mock_cuda::PlacesOfEnvironment environment_;
  StorePtr expected_ = make_store("local");
  StorePtr store_;
};

TEST_P(RowSparseDevicesTest, SumsRows) {
  for (const int64_t num_columns : {67, 64}) { // the second aligned
    columns = num_columns;
    for (const auto dtype :
         {at::kFloat,
          at::kHalf,
          at::kLong,
          at::kComplexFloat,
          at::kFloat8_e5m2}) {
      const Key key(columns * 1000 + static_cast<int64_t>(dtype));
      init(key, random(dtype));
      push_rows(key, dtype == at::kFloat8_e5m2 ? at::kHalf : dtype);
      expect_pulled(key);
      push(key, {random_rows(false, dtype)}); // on one device
      expect_pulled(key);
      push(key, {random(dtype), random_rows(true, dtype), random(dtype)});
      expect_pulled(key);
    }
  }
}

TEST_P(RowSparseDevicesTest, TakesRowsOfAllForms) {
  init(3, random());
  push(
      3,
      {random_rows(false, at::kHalf), random_rows(true), random(at::kDouble)});
  expect_pulled(3);
  const at::Tensor none = sparse(
      at::empty({0}, at::kLong), at::empty({0, columns}), {kRows, columns});
  push(3, {none, random_rows(true)});
  expect_pulled(3);
  push(3, {none});
  expect_pulled(3);
  const at::Tensor strided = sparse(
      at::tensor({int64_t{5}, int64_t{2}}, at::kLong),
      random().t().slice(0, 0, 2).slice(1, 0, columns),
      {kRows, columns});
  push(3, {strided, none});
  expect_pulled(3);
}

TEST_P(RowSparseDevicesTest, OptimizersStepTheRows) {
  for (const bool lazy : {true, false}) {
    for (const auto* rule : {"sgd", "adam", "adagrad", "lamb"}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        const Key key(c10::str(rule, lazy, dtype));
        const double momentum = 0.5;
        Optimizer made = optimizer(
            rule,
            rule == std::string("sgd")
                ? NumbersByName{{"lr", 0.1}, {"momentum", momentum}}
                : NumbersByName{{"lr", 0.1}},
            {{"max_norm", 1000}, {"skip_nonfinite", 1}});
        made.gradient.lazy = lazy;
        init(key, random(dtype));
        for (const auto& store : {store_, expected_}) {
          store->set_optimizer(made);
        }
        push_rows(key, dtype);
        push_rows(key, dtype);
        push(key, {random_rows(false, dtype), random(dtype)});
        push(key, {random_rows(false, dtype)});
        EXPECT_NEAR(
            store_->grad_norm().value_or(0),
            expected_->grad_norm().value_or(1),
            1e-2);
        expect_pulled(key, dtype == at::kBFloat16 ? 2e-2 : 1e-4);
      }
    }
  }
}

TEST_P(RowSparseDevicesTest, EveryRuleStepsRows) {
  if (GetParam().num_devices != 4) {
    GTEST_SKIP() << "rules do not depend on the machine";
  }
  const bool has_kernels = GetParam().has_kernels;
  for (const auto& rule : testing::rule_cases()) {
    if (rule.rule.id == RuleSpec::Id::kMxnetSgld && !has_kernels) {
      continue; // operators have other random numbers
    }
    const Key key(rule.name);
    init(key, at::randn({kRows, columns})); // no sums that are 0, for signs
    for (const auto& store : {store_, expected_}) {
      store->set_optimizer(optimizer(rule.rule));
    }
    for (int i = 0; i < 2; ++i) {
      push(
          key,
          {random_rows(false, at::kFloat, false),
           random_rows(true, at::kFloat, false)});
    }
    // The kernels have the bits of the CPU's, but for norms.
    expect_pulled(key, has_kernels && is_elementwise(rule.rule) ? 0 : 1e-3);
  }
}

TEST_P(RowSparseDevicesTest, AStepOfRowsIsOneKernel) {
  if (GetParam().num_devices != 1 || *GetParam().places != '\0') {
    GTEST_SKIP() << "each shard has its own kernel";
  }
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    const Key key(static_cast<int64_t>(dtype));
    init(key, random(dtype));
    for (const auto& store : {store_, expected_}) {
      store->set_optimizer(optimizer("adam", {{"lr", 0.1}}));
    }
    // As for mixed precision, gradients of other dtypes are read, too.
    for (const auto pushed : {dtype, at::kFloat}) {
      push(key, {random_rows(false, pushed), random_rows(true, pushed)});
      const at::Tensor value = random_rows(false, pushed);
      expected_->push(key, value);
      const at::Tensor on_device = moved(value, 0);
      mock_cuda::counters() = {};
      store_->push(key, on_device);
      EXPECT_EQ(mock_cuda::counters().launches, 1) << dtype << ' ' << pushed;
      expect_pulled(key);
    }
  }
}

// Its rows are read before others are written.
TEST_P(RowSparseDevicesTest, TheValueItselfMayBePushed) {
  for (const auto* rule : {"", "sgd"}) {
    const Key key(rule);
    const at::Tensor value = random();
    const at::Tensor shared = moved(value, 0);
    CallOptions options;
    options.share = true;
    store_->init(key, shared, options);
    expected_->init(key, value);
    if (*rule != 0) {
      for (const auto& store : {store_, expected_}) {
        store->set_optimizer(optimizer(rule, {{"lr", 0.5}}));
      }
    }
    const at::Tensor ids = at::arange(kRows - 1, -1, -1, at::kLong);
    store_->push(key, sparse(moved(ids, 0), shared, {kRows, columns}));
    expected_->push(key, sparse(ids, value.clone(), {kRows, columns}));
    expect_pulled(key);
  }
}

TEST_P(RowSparseDevicesTest, Accumulates) {
  init(3, random());
  for (const auto& store : {store_, expected_}) {
    store->set_optimizer(optimizer("sgd", {{"lr", 0.5}}, {{"accumulate", 2}}));
  }
  for (int i = 0; i < 4; ++i) {
    push_rows(3);
    expect_pulled(3);
  }
}

TEST_P(RowSparseDevicesTest, UpdatersGetRowsWhereTheValueIs) {
  for (const bool takes_rows : {true, false}) {
    const Key key(takes_rows ? 1 : 2);
    init(key, random());
    for (const auto& store : {store_, expected_}) {
      const bool is_device = store == store_;
      store->set_updater(
          testing::updater_of(
              [=](const at::Tensor& input, const at::Tensor& stored) {
                EXPECT_EQ(input.is_sparse(), takes_rows);
                EXPECT_EQ(stored.is_cuda(), is_device);
                if (input.is_sparse()) {
                  EXPECT_EQ(input._values().device(), stored.device());
                  stored.index_add_(0, input._indices()[0], input._values());
                } else {
                  stored.add_(input);
                }
              },
              takes_rows));
    }
    push_rows(key);
    push(key, {random_rows(true)});
    {
      const c10::StreamGuard other(new_stream(device(0)));
      push(key, {random_rows(true)});
    }
    push(key, {random_rows(false)});
    expect_pulled(key);
  }
}

TEST_P(RowSparseDevicesTest, NoDeviceAccessesAnothersMemory) {
  setenv("TORCHKV_P2P", "0", 1);
  init(3, random());
  for (const auto& store : {store_, expected_}) {
    store->set_optimizer(optimizer("sgd", {{"lr", 0.5}}));
  }
  push_rows(3);
  push(3, {random_rows(true), random(), random_rows(false)});
  expect_pulled(3);
  EXPECT_FALSE(mock_cuda::has_any_peer_access());
  unsetenv("TORCHKV_P2P");
}

TEST_P(RowSparseDevicesTest, RowSparseKeysAreInCpuMemory) {
  for (const auto* rule : {"", "sgd", "adam"}) {
    const Key key(rule);
    init(key, random_rows(false));
    if (*rule != 0) {
      for (const auto& store : {store_, expected_}) {
        store->set_optimizer(optimizer(rule, {{"lr", 0.5}}));
      }
    }
    push_rows(key);
    push(key, {random_rows(true), random()});
    expect_pulled(key);
    EXPECT_TRUE(store_->pull(key)[0].is_cpu());
  }
}

TEST_P(RowSparseDevicesTest, ALocalStoreTakesRowsFromDevices) {
  store_ = make_store("local");
  init(3, random());
  for (const auto& store : {store_, expected_}) {
    store->set_optimizer(optimizer("adam", {{"lr", 0.5}}));
  }
  push_rows(3);
  push(3, {random(), random_rows(false)});
  expect_pulled(3);
}

// Runs out of memory at some allocation.
class SmallRuntime final : public testing::WrappedRuntime {
 public:
  at::Tensor allocate(
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::ScalarType dtype,
      c10::Device device) override {
    TORCH_CHECK_WITH(OutOfMemoryError, num_left-- != 0, "no memory");
    return WrappedRuntime::allocate(sizes, strides, dtype, device);
  }
  int64_t num_left = -1; // negative: any number
};

TEST_P(RowSparseDevicesTest, OutOfMemoryChangesNothing) {
  SmallRuntime runtime;
  for (const auto* rule : {"", "sgd", "adam"}) {
    store_ = make_store(GetParam().type, runtime);
    const Key key(rule);
    init(key, random(at::kBFloat16));
    if (*rule != 0) {
      for (const auto& store : {store_, expected_}) {
        store->set_optimizer(optimizer(rule, {{"lr", 0.5}}));
      }
    }
    const at::Tensor before = store_->pull(key)[0].cpu();
    const at::Tensor value = random_rows(/*sorted=*/false, at::kBFloat16);
    int num_failed = 0;
    for (bool is_done = false; !is_done; ++num_failed) {
      runtime.num_left = num_failed;
      try {
        store_->push(key, moved(value, 0));
        is_done = true;
      } catch (const c10::OutOfMemoryError&) {
      }
      runtime.num_left = -1;
      if (!is_done) {
        EXPECT_TRUE(at::equal(store_->pull(key)[0].cpu(), before));
        EXPECT_EQ(store_->version(key), 0);
      }
    }
    EXPECT_GT(num_failed, 1); // failed at all
    expected_->push(key, value);
    expect_pulled(key, 2e-2);
    store_.reset();
  }
}

TEST_P(RowSparseDevicesTest, RefusesRowsThatTheValueDoesNotHave) {
  init(1, random());
  init(2, random());
  for (const int64_t bad : {int64_t{-1}, int64_t{kRows}}) {
    const at::Tensor wrong = sparse(
        at::tensor({int64_t{1}, bad}, at::kLong),
        at::ones({2, columns}),
        {kRows, columns});
    Tensors values;
    for (const bool is_wrong : {false, true}) { // key 1, key 2
      for (size_t replica = 0; replica < 2; ++replica) {
        values.append(moved(random_rows(false), replica));
      }
      values.append(moved(is_wrong ? wrong : random_rows(true), 1));
      values.end_group();
    }
    try {
      store_->push({1, 2}, values);
      FAIL() << "no error";
    } catch (const c10::IndexError& error) {
      const std::string what = error.what_without_backtrace();
      EXPECT_NE(what.find("4000"), std::string::npos) << what;
      EXPECT_NE(
          what.find(c10::str("but got ", bad, " at index 1 (key 2)")),
          std::string::npos)
          << what;
    }
  }
  for (const int key : {1, 2}) {
    expect_pulled(key);
    EXPECT_EQ(store_->version(key), 0);
  }
}

TEST_P(RowSparseDevicesTest, CannotBeCaptured) {
  init(3, random());
  const at::Tensor value = random_rows(true); // in CPU memory
  const std::string error =
      mock_cuda::refusal_in_capture(device(0), [&] { store_->push(3, value); });
  EXPECT_NE(error.find("push: expected no capture"), std::string::npos)
      << error;
  expect_pulled(3);
}

INSTANTIATE_TEST_SUITE_P(
    Machines,
    RowSparseDevicesTest,
    ::testing::Values(
        RowMachine{"one", "device", 1, true, ""},
        RowMachine{"two", "device", 2, true, ""},
        RowMachine{"four", "device", 4, true, ""},
        RowMachine{"operators", "device", 4, false, ""},
        RowMachine{"nccl", "nccl", 4, true, ""},
        RowMachine{"logical", "device", 1, true, "cuda:0,cuda:0,cuda:0"},
        RowMachine{"with_the_cpu", "device", 2, true, "cuda:0,cuda:1,cpu"}),
    [](const auto& machine) { return machine.param.name; });

} // namespace
} // namespace torchkv

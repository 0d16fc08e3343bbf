// Updaters, dtypes, forms of values and codecs on fake GPUs, all with all: as
// in CPU memory, where tests/composition.py compares them with a model.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "devices_test.h"
#include "kernels/cuda/library.h"
#include "kvstore.h"
#include "optimizer_helpers.h"
#include "rule_cases.h"
#include "stores.h"
#include "update/script_updater.h"

namespace torchkv {
namespace {

using mock_cuda::cuda;
using mock_cuda::make_store;
using mock_cuda::StorePtr;
using testing::optimizer;

enum class Form : uint8_t { kDense, kAllRows, kSomeRows, kMixed };

struct ComposingMachine {
  const char* name;
  const char* type;
  bool has_kernels;
};

void PrintTo(const ComposingMachine& machine, std::ostream* out) {
  *out << machine.name;
}

class CompositionTest : public mock_cuda::DevicesTest,
                        public ::testing::WithParamInterface<ComposingMachine> {
 protected:
  static constexpr auto kCodecs =
      {"none", "1bit", "2bit", "fp16", "bf16", "fp8", "int4", "topk"};
  static constexpr int kReplicas = 3;
  static constexpr int64_t kRows = 6;
  static constexpr int64_t kColumns = 5;

  CompositionTest() {
    mock_cuda::reset(kReplicas, mock_cuda::Topology::kPairs);
    if (!GetParam().has_kernels) {
      kernels::cuda::set_table(nullptr);
    }
    at::manual_seed(0);
  }

  static at::Tensor numbers(int64_t num_rows = kRows) {
    return at::randn({num_rows, kColumns});
  }
  // Some rows twice.
  static at::Tensor rows(bool all, c10::ScalarType dtype) {
    const at::Tensor some = at::randint(kRows / 2, {3}, at::kLong);
    const at::Tensor ids =
        all ? at::cat({at::randperm(kRows, at::kLong), some}) : some;
    return on_device(ids, numbers(ids.numel()).to(dtype), c10::kCPU);
  }
  static at::Tensor on_device(
      const at::Tensor& ids,
      const at::Tensor& rows,
      c10::Device device) {
    return at::_sparse_coo_tensor_with_dims_and_tensors(
        1,
        1,
        {kRows, kColumns},
        ids.to(device).unsqueeze(0),
        rows.to(device),
        rows.options().device(device).layout(c10::kSparse),
        /*is_coalesced=*/false);
  }
  static at::Tensor value(Form form, int replica, c10::ScalarType dtype) {
    const bool is_dense =
        form == Form::kDense || (form == Form::kMixed && replica == 1);
    return is_dense ? numbers().to(dtype)
                    : rows(form != Form::kSomeRows, dtype);
  }
  static at::Tensor moved(const at::Tensor& value, c10::Device device) {
    return value.is_sparse()
        ? on_device(value._indices()[0], value._values(), device)
        : value.to(device);
  }

  // Steps twice as in CPU memory.
  template <class SetUpdater>
  void expect_composes(
      const std::string& name,
      SetUpdater set_updater,
      bool is_exact) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const auto form :
           {Form::kDense, Form::kAllRows, Form::kSomeRows, Form::kMixed}) {
        for (const auto* codec : kCodecs) {
          const std::string scheme = codec;
          const bool is_dense = form == Form::kDense;
          if (!is_dense && scheme != "none" && scheme != "2bit") {
            continue; // such values are not compressed
          }
          const StorePtr store = make_store(GetParam().type);
          const StorePtr expected = make_store("device");
          const at::Tensor first = numbers().to(dtype);
          store->init(3, first.to(cuda(0)));
          expected->init(3, first);
          for (const auto& each : {store, expected}) {
            set_updater(*each);
            each->set_gradient_compression(
                {{make_codec("test", codec, {})}, {}});
          }
          for (int step = 0; step < 2; ++step) {
            std::vector<at::Tensor> values;
            std::vector<at::Tensor> on_devices;
            for (int i = 0; i < kReplicas; ++i) {
              values.push_back(value(form, i, dtype));
              on_devices.push_back(moved(values.back(), cuda(i)));
            }
            expected->push(3, Tensors::replicas(values));
            store->push(3, Tensors::replicas(on_devices));
          }
          const at::Tensor result = store->pull(3)[0].cpu();
          const at::Tensor wanted = expected->pull(3)[0];
          const double most = dtype == at::kFloat ? 1e-4
              : dtype == at::kHalf                ? 3e-3
                                                  : 2e-2;
          // NCCL adds in the dtype of the values.
          const bool is_nccl = GetParam().type == std::string("nccl") &&
              is_dense && scheme == "none";
          EXPECT_TRUE(
              is_exact && !is_nccl ? at::equal(result, wanted)
                                   : at::allclose(result, wanted, most, most))
              << name << ' ' << dtype << ' ' << static_cast<int>(form) << ' '
              << codec << " is off by "
              << (result - wanted).abs().max().item<double>();
        }
      }
    }
  }
};

TEST_P(CompositionTest, WithoutAnUpdater) {
  expect_composes(
      "ASSIGN", [](KVStore&) {}, /*is_exact=*/GetParam().has_kernels);
}

TEST_P(CompositionTest, OpaqueUpdaters) {
  expect_composes(
      "AddTwice",
      [](KVStore& store) {
        store.set_updater(std::make_shared<mock_cuda::AddTwice>());
      },
      /*is_exact=*/false);
  torch::jit::Module module("AddTwice");
  module.define(R"(
    def forward(self, key: int, input: Tensor, stored: Tensor):
        stored += input * 2
  )");
  expect_composes(
      "TorchScript",
      [&](KVStore& store) {
        store.set_updater(std::make_shared<ScriptUpdater>(module));
      },
      /*is_exact=*/false);
}

TEST_P(CompositionTest, Rules) {
  auto rules = testing::rule_cases();
  const auto* const group = "mxnet_groupadagrad";
  rules.push_back({group, make_rule("test", group, {{"lr", 0.05}})});
  std::set<RuleSpec::Id> seen;
  for (const auto& rule : rules) {
    if (!seen.insert(rule.rule.id).second) {
      continue; // other options
    }
    expect_composes(
        rule.name,
        [&](KVStore& store) { store.set_optimizer(optimizer(rule.rule)); },
        /*is_exact=*/GetParam().has_kernels && is_elementwise(rule.rule));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Machines,
    CompositionTest,
    ::testing::Values(
        ComposingMachine{"kernels", "device", true},
        ComposingMachine{"operators", "device", false},
        ComposingMachine{"nccl", "nccl", true}),
    [](const auto& machine) { return machine.param.name; });

} // namespace
} // namespace torchkv

// Updaters, dtypes, forms of values and codecs on fake GPUs, all with all: as
// in CPU memory, where tests/composition.py compares them with a model.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <functional>
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

// What is pushed with an updater.
struct Cell {
  c10::ScalarType dtype;
  Form form;
  std::string codec;
  bool is_row_sparse; // the key
};

std::ostream& operator<<(std::ostream& out, const Cell& cell) {
  return out << cell.dtype << ' ' << static_cast<int>(cell.form) << ' '
             << cell.codec << (cell.is_row_sparse ? " row-sparse key" : "");
}

struct ComposingUpdater {
  std::string name;
  std::function<void(KVStore&)> set;
  bool is_exact; // with kernels
  bool takes_row_sparse_keys;
  double factor = 1; // of a sum, and so of its rounding, in a step
};

class CompositionTest : public mock_cuda::DevicesTest,
                        public ::testing::WithParamInterface<ComposingMachine> {
 protected:
  static constexpr auto kCodecs =
      {"none", "1bit", "2bit", "fp16", "bf16", "fp8", "int4", "topk"};
  static constexpr auto kForms = {
      Form::kDense,
      Form::kAllRows,
      Form::kSomeRows,
      Form::kMixed};
  static constexpr int kReplicas = 3;
  static constexpr int64_t kRows = 6;
  static constexpr int64_t kColumns = 5;

  CompositionTest() {
    mock_cuda::reset(kReplicas, mock_cuda::Topology::kPairs);
    if (!GetParam().has_kernels) {
      kernels::cuda::set_table(nullptr);
    }
    // By which no step of Signum's is the sign of a number that is 0 but for
    // rounding: weights and sums in bf16 may be such that weight decay cancels.
    at::manual_seed(1);
  }

  static at::Tensor numbers(int64_t num_rows = kRows) {
    return at::randn({num_rows, kColumns});
  }
  // Some rows twice.
  static at::Tensor rows(bool all, c10::ScalarType dtype) {
    const at::Tensor some = at::randint(1, kRows - 1, {2}, at::kLong);
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

  // A push's values, in CPU memory and on the devices.
  struct Pushed {
    Pushed(Form form, c10::ScalarType dtype) {
      for (int i = 0; i < kReplicas; ++i) {
        host.push_back(value(form, i, dtype));
        devices.push_back(moved(host.back(), cuda(i)));
      }
    }
    std::vector<at::Tensor> host;
    std::vector<at::Tensor> devices;
  };
  // "" or why the push is refused.
  static std::string push(
      KVStore& store,
      const std::vector<at::Tensor>& values) {
    try {
      store.push(3, Tensors::replicas(values));
      return "";
    } catch (const c10::NotImplementedError& error) {
      return error.what_without_backtrace();
    }
  }

  // Steps twice as in CPU memory, or is refused with the same words.
  static void expect_composes(
      const ComposingUpdater& updater,
      const Cell& cell) {
    const StorePtr store = make_store(GetParam().type);
    const StorePtr expected = make_store("device");
    const at::Tensor first = numbers().to(cell.dtype);
    if (cell.is_row_sparse) {
      const at::Tensor ids = at::arange(kRows, at::kLong);
      store->init(3, on_device(ids, first, cuda(0)));
      expected->init(3, on_device(ids, first, c10::kCPU));
    } else {
      store->init(3, first.to(cuda(0)));
      expected->init(3, first);
    }
    for (const auto& each : {store, expected}) {
      updater.set(*each);
      each->set_gradient_compression(
          {{make_codec("test", cell.codec, {})}, {}});
    }
    for (int step = 0; step < 2; ++step) {
      const Pushed values(cell.form, cell.dtype);
      const std::string refusal = push(*expected, values.host);
      EXPECT_EQ(push(*store, values.devices), refusal)
          << updater.name << ' ' << cell;
      EXPECT_EQ(
          refusal.empty(), !cell.is_row_sparse || updater.takes_row_sparse_keys)
          << updater.name << ' ' << cell << refusal;
    }
    const at::Tensor result = store->pull(3)[0].cpu().to_dense();
    const at::Tensor wanted = expected->pull(3)[0].to_dense();
    // NCCL adds in the dtype of the values.
    const bool is_nccl = GetParam().type == std::string("nccl") &&
        cell.form == Form::kDense && cell.codec == "none";
    const double most = (is_nccl ? updater.factor : 1) *
        (cell.dtype == at::kFloat      ? 1e-4
             : cell.dtype == at::kHalf ? 3e-3
                                       : 2e-2);
    EXPECT_TRUE(
        updater.is_exact && GetParam().has_kernels && !is_nccl
            ? at::equal(result, wanted)
            : at::allclose(result, wanted, most, most))
        << updater.name << ' ' << cell << " is off by "
        << (result - wanted).abs().max().item<double>();
  }
  static void expect_composes(const ComposingUpdater& updater) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const auto form : kForms) {
        // Which compresses dense values only.
        const bool has_all_codecs = dtype == at::kFloat || form == Form::kDense;
        for (const std::string codec : kCodecs) {
          if (has_all_codecs || codec == "none" || codec == "2bit") {
            expect_composes(updater, {dtype, form, codec, false});
          }
        }
        for (const char* codec : {"none", "2bit"}) {
          expect_composes(updater, {dtype, form, codec, true});
        }
      }
    }
  }
};

TEST_P(CompositionTest, WithoutAnUpdater) {
  expect_composes({"ASSIGN", [](KVStore&) {}, true, true});
}

TEST_P(CompositionTest, OpaqueUpdaters) {
  const auto set_add_twice = [](KVStore& store) {
    store.set_updater(std::make_shared<mock_cuda::AddTwice>());
  };
  expect_composes({"AddTwice", set_add_twice, false, false, 2});
  torch::jit::Module module("AddTwice");
  module.define(R"(
    def forward(self, key: int, input: Tensor, stored: Tensor):
        if stored.is_sparse:
            stored._values().add_(input._values() * 2)
        elif input.is_sparse:
            stored.index_add_(0, input._indices()[0], input._values() * 2)
        else:
            stored += input * 2
  )");
  for (const bool takes_rows : {false, true}) {
    const auto set = [&](KVStore& store) {
      store.set_updater(std::make_shared<ScriptUpdater>(module, takes_rows));
    };
    expect_composes(
        {takes_rows ? "TorchScript of rows" : "TorchScript",
         set,
         false,
         takes_rows,
         2});
  }
}

TEST_P(CompositionTest, Rules) {
  auto rules = testing::rule_cases();
  const auto* const group = "mxnet_groupadagrad";
  rules.push_back({group, make_rule("test", group, {{"lr", 0.05}})});
  std::set<RuleSpec::Id> seen;
  for (const auto& rule : rules) {
    const ComposingUpdater updater{
        rule.name,
        [&](KVStore& store) { store.set_optimizer(optimizer(rule.rule)); },
        is_elementwise(rule.rule),
        needs_only_rows(rule.rule)};
    if (seen.insert(rule.rule.id).second) {
      expect_composes(updater);
      continue;
    }
    // Other options, of the rule's state above all.
    for (const auto form : kForms) {
      for (const bool is_row_sparse : {false, true}) {
        expect_composes(updater, {at::kFloat, form, "none", is_row_sparse});
      }
    }
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

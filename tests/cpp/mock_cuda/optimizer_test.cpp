// Optimizers on fake GPUs match those in CPU memory.
#include "update/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <tuple>

#include "devices_test.h"
#include "kernels/cuda/library.h"
#include "kvstore.h"
#include "rule_cases.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::Carrier;
using mock_cuda::cuda;
using mock_cuda::make_optimizer;
using mock_cuda::make_store;

class KVStoreOptimizerTest : public mock_cuda::DevicesTest,
                             public ::testing::WithParamInterface<
                                 std::tuple<testing::RuleCase, Carrier>> {
 protected:
  KVStoreOptimizerTest() {
    if (std::get<1>(GetParam()) == Carrier::kOperators) {
      kernels::cuda::set_table(nullptr);
    }
  }
};

at::Tensor stored_after_steps(
    const Optimizer& optimizer,
    c10::ScalarType dtype,
    c10::Device home,
    c10::Device other) {
  const auto store = make_store();
  const auto value = [&](double first, c10::Device device) {
    return at::linspace(first, 1, 12, at::kDouble).to(dtype).to(device);
  };
  store->init(3, value(-1, home));
  store->set_optimizer(optimizer);
  for (int step = 0; step < 4; ++step) {
    store->push(3, Tensors::replicas({value(step, home), value(-3, other)}));
  }
  return store->pull(3)[0].cpu();
}

TEST_P(KVStoreOptimizerTest, StepsAsOnTheCpu) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexFloat}) {
    for (const bool clips : {false, true}) {
      Optimizer optimizer = make_optimizer(std::get<0>(GetParam()).rule);
      optimizer.gradient.max_norm = clips ? 1 : 0;
      const at::Tensor expected =
          stored_after_steps(optimizer, dtype, c10::kCPU, c10::kCPU);
      const at::Tensor result =
          stored_after_steps(optimizer, dtype, cuda(1), cuda(3));
      const double tolerance = dtype == at::kBFloat16 ? 1e-2 : 1e-5;
      EXPECT_TRUE(at::allclose(result, expected, tolerance, tolerance))
          << dtype << result << expected;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Rules,
    KVStoreOptimizerTest,
    ::testing::Combine(
        ::testing::ValuesIn(testing::rule_cases()),
        ::testing::Values(Carrier::kOperators, Carrier::kKernels)));

} // namespace
} // namespace torchkv

// A form of values that needs a backend of its own, on several devices and with
// NCCL.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "comm/run_length.h"
#include "devices_test.h"
#include "error_text.h"
#include "stores.h"

namespace torchkv::mock_cuda {
namespace {

using testing::constant;
using testing::error_text;
using testing::Pushed;
using testing::RegisteredRunLength;

using Groups = std::vector<std::vector<Pushed>>;

// By store type.
class BackendsTest : public DevicesTest,
                     public ::testing::WithParamInterface<const char*> {
 protected:
  // With a value of zeros.
  StorePtr make() const {
    auto store = make_store(GetParam());
    store->init(1, full(0));
    return store;
  }
  static Pushed on(int device, Pushed value) {
    value.data = value.data.to(cuda(device));
    return value;
  }
  // On each device one, some of them encoded.
  static std::vector<Pushed> replicas(double first) {
    std::vector<Pushed> result;
    for (int i = 0; i < 4; ++i) {
      result.push_back(
          i % 2 == 0 ? on(i, constant(first + i, {2, 3}))
                     : Pushed{full(first + i, cuda(i))});
    }
    return result;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Types,
    BackendsTest,
    ::testing::Values("local", "device", "nccl"));

TEST_P(BackendsTest, WithoutABackendNothingChanges) {
  const auto store = make();
  store->push(1, testing::dense({replicas(1)}));
  const auto values = testing::encoded({replicas(1)});
  EXPECT_EQ(
      error_text<c10::NotImplementedError>([&] { store->push(1, values); }),
      "push: expected a value of a form that has a backend, but got "
      "'run-length' (key 1)");
  expect_full(store->pull(1)[0], 10);
}

TEST_P(BackendsTest, AddsUpWhatTheBackendDecodes) {
  const RegisteredRunLength form;
  const auto store = make();
  store->push(1, testing::encoded({replicas(1)}));
  expect_full(store->pull(1)[0], 10);
  // Some without a value on the home device, one in CPU memory.
  store->push(
      1,
      testing::encoded(
          {{on(3, constant(1, {2, 3})),
            Pushed{full(2, cuda(2))},
            constant(4, {2, 3})}}));
  expect_full(store->pull(1)[0], 7);
  store->push(1, testing::encoded({{on(2, constant(5, {2, 3}))}}));
  expect_full(store->pull(1)[0], 5);
}

TEST_P(BackendsTest, StepsWithWhatTheBackendDecodes) {
  const RegisteredRunLength form;
  const auto store = make();
  const auto expected = make();
  Optimizer optimizer = make_optimizer("sgd");
  optimizer.gradient = make_gradient(
      "test", {{"max_norm", 2}, {"accumulate", 2}, {"skip_nonfinite", 1}});
  for (const auto& each : {store, expected}) {
    each->set_optimizer(optimizer);
  }
  for (int i = 0; i < 4; ++i) {
    store->push(1, testing::encoded({replicas(i)}));
    expected->push(1, testing::dense({replicas(i)}));
    EXPECT_TRUE(at::equal(store->pull(1)[0].cpu(), expected->pull(1)[0].cpu()));
  }
  EXPECT_EQ(store->grad_norm(), expected->grad_norm());
  store->set_updater(std::make_shared<AddTwice>());
  const double before = store->pull(1)[0].cpu()[0][0].item<double>();
  store->push(1, testing::encoded({replicas(1)}));
  EXPECT_TRUE(at::allclose(store->pull(1)[0].cpu(), full(before + 20)));
}

TEST_P(BackendsTest, ABackendMayRefuse) {
  RegisteredRunLength form;
  const auto store = make();
  form.seen.claims = false;
  const auto text = error_text<c10::NotImplementedError>(
      [&] { store->push(1, testing::encoded({replicas(1)})); });
  EXPECT_NE(text.find("run-length"), std::string::npos) << text;
  EXPECT_NE(text.find("(key 1)"), std::string::npos) << text;
  expect_full(store->pull(1)[0], 0);
}

} // namespace
} // namespace torchkv::mock_cuda

#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "kvstore.h"
#include "rule_cases.h"
#include "update/optimizer.h"

// Helpers for tests of stores with optimizers.
namespace torchkv::testing {

using Store = c10::intrusive_ptr<KVStore>;

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline Optimizer optimizer(
    const RuleSpec& rule,
    const NumbersByName& gradient = {}) {
  return {{rule}, {}, make_gradient("test", gradient)};
}

inline Optimizer optimizer(
    const char* rule,
    const NumbersByName& numbers,
    const NumbersByName& gradient = {}) {
  return optimizer(make_rule("test", rule, numbers), gradient);
}

inline Store store_with(const at::Tensor& value, Optimizer optimizer) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(1, value);
  store->set_optimizer(std::move(optimizer));
  return store;
}

inline at::Tensor value_of(const Store& store, const Key& key = 1) {
  return store->pull(key)[0];
}

inline KeyState state_of(const Store& store, const Key& key = 1) {
  return store->optimizer_states(key)[0];
}

inline int64_t bytes_of(const KeyState& state) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : state.tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

// Close in relative and absolute terms.
inline void expect_close(
    const at::Tensor& actual,
    const at::Tensor& expected,
    double tolerance,
    const std::string& what = "") {
  EXPECT_TRUE(
      at::allclose(
          actual, expected.to(actual.scalar_type()), tolerance, tolerance))
      << what << '\n'
      << actual << '\n'
      << expected;
}

inline void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_TRUE(at::equal(actual, expected)) << actual << '\n' << expected;
}

inline void expect_same_state(const KeyState& a, const KeyState& b) {
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.num_accumulated, b.num_accumulated);
  EXPECT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, tensor] : a.tensors) {
    ASSERT_EQ(b.tensors.count(name), 1) << name;
    expect_equal(tensor, b.tensors.at(name));
  }
}

// For tests of every rule with every option.
class RuleTest : public ::testing::TestWithParam<RuleCase> {
 protected:
  void SetUp() override {
    at::manual_seed(0);
  }
  const RuleSpec& rule_ = GetParam().rule;
};

inline std::string rule_name(const ::testing::TestParamInfo<RuleCase>& info) {
  return info.param.name;
}

} // namespace torchkv::testing

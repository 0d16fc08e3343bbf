#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <optional>

#include "devices.h"
#include "kvstore.h"

// Stores on fake devices: their inputs and expected results.
namespace torchkv::mock_cuda {

// What moves and sums values.
enum class Carrier : uint8_t { kOperators, kKernels, kNccl };

using StorePtr = c10::intrusive_ptr<KVStore>;

inline StorePtr make_store(
    const char* type = "device",
    Runtime& runtime = default_runtime()) {
  return c10::make_intrusive<KVStore>(type, runtime);
}

// Read when a store is created.
class PlacesOfEnvironment {
 public:
  explicit PlacesOfEnvironment(const char* places) {
    setenv("TORCHKV_PLACES", places, /*replace=*/1);
  }
  ~PlacesOfEnvironment() {
    unsetenv("TORCHKV_PLACES");
  }
  PlacesOfEnvironment(const PlacesOfEnvironment&) = delete;
  PlacesOfEnvironment& operator=(const PlacesOfEnvironment&) = delete;
  PlacesOfEnvironment(PlacesOfEnvironment&&) = delete;
  PlacesOfEnvironment& operator=(PlacesOfEnvironment&&) = delete;
};

// The asynchronous calls.
constexpr CallOptions kAsync{0, true};
inline torchkv::WorkPtr push_async(
    KVStore& store,
    const Keys& keys,
    const Tensors& values) {
  return store.push(keys, values, kAsync);
}
inline torchkv::WorkPtr pull_async(
    const KVStore& store,
    const Keys& keys,
    const Tensors& outs) {
  return store.pull(keys, outs, kAsync);
}
inline torchkv::WorkPtr pushpull_async(
    KVStore& store,
    const Keys& keys,
    const Tensors& values,
    const Tensors& outs) {
  return store.pushpull(keys, values, outs, kAsync);
}
inline torchkv::WorkPtr broadcast_async(
    KVStore& store,
    const Keys& keys,
    const Tensors& values,
    const Tensors& outs) {
  return store.broadcast(keys, values, outs, kAsync);
}

// 0, 1, ...
inline Keys first_keys(int count) {
  Keys keys;
  keys.single = false;
  for (int i = 0; i < count; ++i) {
    keys.list.emplace_back(i);
  }
  return keys;
}

inline at::Tensor full(double value, c10::Device device = c10::kCPU) {
  return at::full({2, 3}, value, at::device(device).dtype(at::kFloat));
}

inline void expect_full(const at::Tensor& tensor, double value) {
  EXPECT_TRUE(at::equal(tensor.cpu(), full(value))) << tensor.cpu();
}

inline Optimizer make_optimizer(const RuleSpec& rule) {
  Optimizer optimizer;
  optimizer.groups.push_back(rule);
  return optimizer;
}

inline Optimizer make_optimizer(const char* rule) {
  return make_optimizer(make_rule("test", rule, {{"lr", 1}}));
}

// stored += 2 * input, with temporaries.
class AddTwice final : public OpaqueUpdater {
 public:
  void update(
      const Key& /*key*/,
      const at::Tensor& input,
      const at::Tensor& stored) override {
    if (stored.is_cuda()) {
      EXPECT_EQ(mock_cuda::current_device(), stored.device());
    }
    EXPECT_EQ(input.sizes(), stored.sizes());
    stored.add_(input * 2);
  }
  std::optional<KeyKind> key_kind() const override {
    return std::nullopt;
  }
  at::Tensor serialize() const override {
    return {};
  }
};

} // namespace torchkv::mock_cuda

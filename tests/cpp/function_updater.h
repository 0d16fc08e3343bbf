#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "update/updater.h"

namespace torchkv::testing {

// Runs a function of a test as updater.
class FunctionUpdater final : public OpaqueUpdater {
 public:
  using Function =
      std::function<void(const at::Tensor& input, const at::Tensor& stored)>;

  explicit FunctionUpdater(Function function, bool takes_rows = false)
      : OpaqueUpdater(takes_rows), function_(std::move(function)) {}

  void update(
      const Key& /*key*/,
      const at::Tensor& input,
      const at::Tensor& stored) override {
    function_(input, stored);
  }
  std::optional<KeyKind> key_kind() const override {
    return std::nullopt;
  }
  at::Tensor serialize() const override {
    return {};
  }

 private:
  const Function function_;
};

inline std::shared_ptr<OpaqueUpdater> updater_of(
    FunctionUpdater::Function function,
    bool takes_rows = false) {
  return std::make_shared<FunctionUpdater>(std::move(function), takes_rows);
}

} // namespace torchkv::testing

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace torchkv::testing {

// A tensor that is easy to recognize.
inline at::Tensor number(int64_t value) {
  return at::scalar_tensor(value, at::kLong);
}

inline std::vector<int64_t> numbers(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<int64_t> result;
  for (const auto& tensor : tensors) {
    result.push_back(tensor.item<int64_t>());
  }
  return result;
}

} // namespace torchkv::testing

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <unordered_map>

namespace torchkv {

// A copy of an optimizer's state for a key. The tensors are those of
// state_names, and "master" and "accumulated" if the key has them.
struct KeyState {
  int64_t step = 0;
  int64_t num_accumulated = 0;
  std::unordered_map<std::string, at::Tensor> tensors;
};

// In what a store hands out of a row-sparse key: the ids of the rows,
// ascending.
constexpr const char* kRowIds = "row_ids";

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <unordered_map>

namespace torchkv {

// What an optimizer keeps for a key: copies that share nothing with the store.
// The tensors are those of state_names, and "master" and "accumulated" where
// the key has them.
struct KeyState {
  int64_t step = 0;
  int64_t num_accumulated = 0;
  std::unordered_map<std::string, at::Tensor> tensors;
};

} // namespace torchkv

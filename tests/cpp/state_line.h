#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "kernels/cpu/lines.h"

namespace torchkv::testing {

// The memory of a rule's state; undefined tensors are not used.
inline kernels::cpu::StateLine state_line(
    const std::array<at::Tensor, kMaxStates>& states,
    const at::Tensor& master = {}) {
  const auto data_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<char*>(tensor.mutable_data_ptr())
                            : nullptr;
  };
  kernels::cpu::StateLine line;
  line.master = data_of(master);
  for (size_t i = 0; i < kMaxStates; ++i) {
    line.states[i] = data_of(states[i]);
  }
  return line;
}

} // namespace torchkv::testing

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace torchkv::kernels::cpu {

// Functions that read and write lines of one dtype at any stride in bytes, with
// sums in acc_t. `load` sets the total or adds to it.
template <typename acc_t>
struct Access {
  void (*load)(
      const char* source,
      int64_t stride,
      bool is_add,
      acc_t* total,
      int64_t num_elements);
  void (*store)(
      const acc_t* total,
      char* result,
      int64_t stride,
      int64_t num_elements);
};

// REQUIRES: acc_t is the at::toOpMathType of some dtype, or int64_t for all
// integers.
template <typename acc_t>
Access<acc_t> access(c10::ScalarType dtype);

} // namespace torchkv::kernels::cpu

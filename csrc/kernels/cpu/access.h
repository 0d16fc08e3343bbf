#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace torchkv::kernels::cpu {

// What reads and writes lines of one dtype, at any stride in bytes, when sums
// are in acc_t. `load` sets or adds to the total.
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

// REQUIRES: an acc_t that at::toOpMathType makes of a dtype, or int64_t for all
// integers.
template <typename acc_t>
Access<acc_t> access(c10::ScalarType dtype);

} // namespace torchkv::kernels::cpu

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace torchkv::kernels::cpu {

// Functions that read and write lines of one dtype at any stride in bytes, with
// sums in acc_t. `load` sets the total or adds to it.
struct Access {
  void (*load)(
      const char* source,
      int64_t stride,
      bool is_add,
      void* total,
      int64_t num_elements) = nullptr;
  void (*store)(
      const void* total,
      char* result,
      int64_t stride,
      int64_t num_elements) = nullptr;
};

// REQUIRES: acc_t is the at::toOpMathType of some dtype, or int64_t for all
// integers.
template <typename acc_t>
Access access(c10::ScalarType dtype);

} // namespace torchkv::kernels::cpu

#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

namespace torchkv::kernels::cpu {

// A sum of lines without gaps, in registers. Integers are added as unsigned
// ones: the same bits, and overflow wraps around as PyTorch's does. A complex
// number is added as two real ones. `stream` writes past the caches.
// REQUIRES for `stream`: a result aligned to a cache line.
struct DenseAdd {
  void (*function)(
      const char* const* values,
      size_t num_values,
      char* result,
      int64_t num_numbers,
      bool stream) = nullptr;
  int64_t numbers_per_element = 1;
};

// No function where the dtype is added in another one.
DenseAdd dense_add(c10::ScalarType dtype);

} // namespace torchkv::kernels::cpu

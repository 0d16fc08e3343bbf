#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

namespace torchkv::kernels::cpu {

// The sum of dense lines in registers. Integers are added as unsigned ones: the
// same bits, and overflow wraps around as in PyTorch. A complex number is added
// as two real ones. `stream` bypasses the caches.
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

// The function is null if the accumulation type differs from the dtype.
DenseAdd dense_add(c10::ScalarType dtype);

} // namespace torchkv::kernels::cpu

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../../core/export.h"

namespace torchkv::kernels::cpu {

// The elements of greatest magnitude: those whose magnitude has more than
// `least_bits` as an unsigned integer and, of those that have as many, those
// before `ties_end`. NaN is greater than infinity.
struct TopElements {
  uint64_t least_bits = 0;
  int64_t ties_end = 0;
};

// Selects `count` of the sums of a value, which is converted to the residual's
// dtype, and the residual (null: 0). Uses PyTorch's intra-op threads.
// REQUIRES: 0 < count <= num_elements; a residual's dtype of fp32 or fp64.
TORCHKV_API TopElements select_top(
    const char* value,
    c10::ScalarType dtype,
    const char* residual,
    c10::ScalarType residual_dtype,
    int64_t num_elements,
    int64_t count);

} // namespace torchkv::kernels::cpu

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "core/rule.h"
#include "kernels/cpu/lines.h"

namespace torchkv::testing {

// SumLine and LambLine behind one C function, which tests load from libraries
// that are each compiled for one instruction set.
struct LineCall {
  enum class What : uint8_t { kSum, kSquaredNorm, kLambNorms, kLambMove };

  What what = What::kSum;
  const c10::ScalarType* dtypes = nullptr; // of the values
  size_t num_values = 0;
  c10::ScalarType stored_dtype = c10::kFloat;
  c10::ScalarType accumulation = c10::kFloat;
  RuleStep step;

  const char* const* values = nullptr;
  const int64_t* strides = nullptr; // in bytes; null = dense
  char* stored = nullptr;
  int64_t stored_stride = 0;
  kernels::cpu::StateLine state;
  int64_t num_elements = 0;
  bool stream = false;

  // Of weight and direction, which kLambNorms sets and kLambMove gets; or the
  // result of kSquaredNorm.
  double* norms = nullptr;
};

} // namespace torchkv::testing

extern "C" void torchkv_sum_line(const torchkv::testing::LineCall& call);

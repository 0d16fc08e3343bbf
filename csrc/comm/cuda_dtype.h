#pragma once

#include <ATen/OpMathType.h>
#include <c10/core/ScalarType.h>

#include <optional>

#include "../kernels/cuda/params.h"

namespace torchkv {

// A dtype as the kernels see it, if they support it: of a complex number, that
// of its two parts.
inline std::optional<kernels::cuda::Dtype> cuda_dtype(c10::ScalarType dtype) {
  using kernels::cuda::Dtype;
  switch (dtype) {
    case c10::kFloat:
    case c10::kComplexFloat:
      return Dtype::kFloat;
    case c10::kHalf:
    case c10::kComplexHalf:
      return Dtype::kHalf;
    case c10::kBFloat16:
      return Dtype::kBFloat16;
    case c10::kDouble:
    case c10::kComplexDouble:
      return Dtype::kDouble;
    case c10::kBool:
      return Dtype::kBool;
    case c10::kByte:
    case c10::kChar:
      return Dtype::kInt8;
    case c10::kShort:
    case c10::kUInt16:
      return Dtype::kInt16;
    case c10::kInt:
    case c10::kUInt32:
      return Dtype::kInt32;
    case c10::kLong:
    case c10::kUInt64:
      return Dtype::kInt64;
    default:
      return std::nullopt;
  }
}

// The type in which the kernels sum such numbers.
inline c10::ScalarType sum_type(c10::ScalarType dtype) {
  return c10::isIntegralType(dtype, /*includeBool=*/true)
      ? dtype
      : at::toOpMathType(dtype);
}

} // namespace torchkv

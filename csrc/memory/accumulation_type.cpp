#include "accumulation_type.h"

#include <ATen/OpMathType.h>

namespace torchkv {
namespace {

// PyTorch promotes fp8 only with itself, and uint16, uint32 and uint64 with no
// other integers. A sum in int64 has the same bits as in any of these.
c10::ScalarType promotable(c10::ScalarType dtype) {
  if (c10::isFloat8Type(dtype)) {
    return c10::kFloat;
  }
  return c10::isBarebonesUnsignedType(dtype) ? c10::kLong : dtype;
}

} // namespace

c10::ScalarType accumulation_type(
    c10::ArrayRef<Value> values,
    c10::ScalarType stored) {
  c10::ScalarType dtype = promotable(stored);
  for (const auto& value : values) {
    const auto other = promotable(value.dtype());
    dtype = other == dtype ? dtype : c10::promoteTypes(dtype, other);
  }
  return at::toOpMathType(dtype);
}

} // namespace torchkv

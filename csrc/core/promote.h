#pragma once

#include <c10/core/ScalarType.h>

namespace torchkv {

// PyTorch promotes fp8 only with itself, and uint16, uint32 and uint64 with no
// other integers. A sum in int64 has the same bits as in any of these.
inline c10::ScalarType promotable(c10::ScalarType dtype) {
  if (c10::isFloat8Type(dtype)) {
    return c10::kFloat;
  }
  return c10::isBarebonesUnsignedType(dtype) ? c10::kLong : dtype;
}

// As c10::promoteTypes, of all dtypes.
inline c10::ScalarType promoted(c10::ScalarType a, c10::ScalarType b) {
  a = promotable(a);
  b = promotable(b);
  return a == b ? a : c10::promoteTypes(a, b);
}

} // namespace torchkv

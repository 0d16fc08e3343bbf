#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include "../core/value.h"

namespace torchkv {

// The dtype in which values are summed for a stored value of dtype `stored`:
// at::toOpMathType of the promotion of them all; fp8 counts as fp32.
c10::ScalarType accumulation_type(
    c10::ArrayRef<Value> values,
    c10::ScalarType stored);

} // namespace torchkv

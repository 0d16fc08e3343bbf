#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include "../../export.h"
#include "../../value.h"

namespace torchkv::kernels::cpu {

// result = values[0] + values[1] + ..., added left to right in `accumulation`
// and rounded once to the dtype of `result`, in one pass that allocates nothing
// that grows with the value. Strides and dtypes may differ.
//
// `same_layout` says that all tensors have the dtype and the strides of
// `result`, which is non-overlapping and dense: raw memory is added.
//
// REQUIRES: at least one value; all on the CPU, of the shape of `result`,
// without conj, neg or zero bits; conversion from `accumulation` is allowed.
// Blocks until done; any thread; large sums use PyTorch's intra-op threads.
// Versions of `result` are not counted.
TORCHKV_API void sum(
    c10::ArrayRef<Value> values,
    const at::Tensor& result,
    c10::ScalarType accumulation,
    bool same_layout);

// result = value, as raw memory: both have one dtype and the same strides,
// which are non-overlapping and dense. Otherwise as sum().
TORCHKV_API void copy(const at::Tensor& value, const at::Tensor& result);

} // namespace torchkv::kernels::cpu

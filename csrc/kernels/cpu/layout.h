#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace torchkv::kernels::cpu {

// Whether two tensors of such sizes and strides have the same memory layout:
// element i of one, in the order of its memory, is element i of the other.
inline bool same_layout(
    c10::IntArrayRef sizes,
    c10::IntArrayRef a_strides,
    c10::IntArrayRef b_strides) {
  if (a_strides == b_strides) {
    return true;
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    // Strides of dimensions of size 1 are arbitrary.
    if (sizes[i] != 1 && a_strides[i] != b_strides[i]) {
      return false;
    }
  }
  return true;
}

// REQUIRES: tensors of the same shape.
inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) ||
      same_layout(a.sizes(), a.strides(), b.strides());
}

} // namespace torchkv::kernels::cpu

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "../core/plain_dispatch.h"
#include "entry.h"

namespace torchkv {

// Whether the memory holds the elements themselves, without lazy operations.
inline bool is_plain(const at::Tensor& tensor) {
  return !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

inline bool is_plain_cpu(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && is_plain(tensor);
}

// Bytes from the beginning of a storage to the end of the tensor's last element
// in it. A storage can be shrunk while tensors use it.
inline size_t needed_storage_bytes(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0
                             : at::detail::computeStorageNbytes(
                                   tensor.sizes(),
                                   tensor.strides(),
                                   tensor.element_size(),
                                   tensor.storage_offset());
}

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

// Whether the CPU kernels can copy one into the other. REQUIRES: equal shapes.
inline bool is_plain_cpu_copy(const at::Tensor& source, const at::Tensor& out) {
  return is_plain_cpu(source) && is_plain_cpu(out) &&
      source.scalar_type() == out.scalar_type() && same_layout(source, out) &&
      source.is_non_overlapping_and_dense();
}

// Whether a tensor of an entry's shape has the stored value's memory layout.
inline bool has_layout_of(const Entry& entry, const at::Tensor& tensor) {
  return is_plain(tensor) &&
      same_layout(tensor.sizes(), tensor.strides(), entry.strides);
}

// Whether the elements of the stored value are in the order of a contiguous
// tensor's.
inline bool is_contiguous(const Entry& entry) {
  return entry.meta.num_elements == 0 ||
      same_layout(
             entry.meta.sizes,
             entry.strides,
             at::detail::defaultStrides(entry.meta.sizes));
}

// The memory from a tensor's first element to the end of its last.
struct Span {
  const char* begin = nullptr;
  const char* end = nullptr;
};

inline Span span_of(const at::Tensor& tensor) {
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  int64_t count = tensor.numel();
  if (count != 0 && !tensor.is_non_overlapping_and_dense()) {
    count = 1;
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      count += (tensor.size(i) - 1) * tensor.stride(i);
    }
  }
  return {data, data + count * static_cast<int64_t>(tensor.element_size())};
}

// A view of the elements [begin, end) in memory order. REQUIRES: dense.
inline at::Tensor part_of(
    const at::Tensor& tensor,
    int64_t begin,
    int64_t end) {
  const PlainDispatch plain;
  return at::as_strided(
      tensor, {end - begin}, {1}, tensor.storage_offset() + begin);
}

} // namespace torchkv

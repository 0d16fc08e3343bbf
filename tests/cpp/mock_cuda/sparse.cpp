// Sparse tensors on the fake devices: made, and taken apart.
#include <ATen/ATen.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

namespace torchkv::mock_cuda {
namespace {

at::Tensor make_sparse(
    int64_t sparse_dim,
    int64_t dense_dim,
    c10::IntArrayRef sizes,
    const at::Tensor& indices,
    const at::Tensor& values,
    std::optional<c10::ScalarType> /*dtype*/,
    std::optional<c10::Layout> /*layout*/,
    std::optional<c10::Device> /*device*/,
    std::optional<bool> /*pin_memory*/,
    std::optional<bool> is_coalesced) {
  const c10::DeviceGuard guard(values.device());
  at::Tensor result = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::SparseCUDA), values.dtype());
  auto* impl = static_cast<at::SparseTensorImpl*>(result.unsafeGetTensorImpl());
  impl->resize_(sparse_dim, dense_dim, sizes);
  impl->set_indices_and_values_unsafe(indices, values);
  impl->set_coalesced(is_coalesced.value_or(false));
  return result;
}

at::Tensor indices_of(const at::Tensor& sparse) {
  return static_cast<at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl())
      ->indices();
}

at::Tensor values_of(const at::Tensor& sparse) {
  return static_cast<at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl())
      ->values();
}

int64_t sparse_dim_of(const at::Tensor& sparse) {
  return static_cast<at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl())
      ->sparse_dim();
}

TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  library.impl("sparse_dim", &sparse_dim_of);
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", &make_sparse);
  library.impl("_indices", &indices_of);
  library.impl("_values", &values_of);
}

} // namespace
} // namespace torchkv::mock_cuda

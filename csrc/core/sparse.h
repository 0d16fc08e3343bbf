#pragma once

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>

namespace torchkv {

// The members of a torch.sparse_coo tensor, without operators such as
// _values(), which a mode of the caller would intercept. REQUIRES: not a
// wrapper.
inline const at::SparseTensorImpl& sparse_impl(const at::Tensor& tensor) {
  return *static_cast<const at::SparseTensorImpl*>(
      tensor.unsafeGetTensorImpl());
}

} // namespace torchkv

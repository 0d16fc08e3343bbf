#pragma once

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>

namespace torchkv {

// A torch.sparse_coo tensor's own members, which no mode of the caller sees, as
// it would operators such as _values(). REQUIRES: not a wrapper.
inline const at::SparseTensorImpl& sparse_impl(const at::Tensor& tensor) {
  return *static_cast<const at::SparseTensorImpl*>(
      tensor.unsafeGetTensorImpl());
}

} // namespace torchkv

#include "layout.h"

#include <ATen/EmptyTensor.h>

namespace torchkv {

size_t needed_storage_bytes(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0
                             : at::detail::computeStorageNbytes(
                                   tensor.sizes(),
                                   tensor.strides(),
                                   tensor.element_size(),
                                   tensor.storage_offset());
}

} // namespace torchkv

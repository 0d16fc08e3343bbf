#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <vector>

#include "../core/export.h"
#include "../store/arguments.h"
#include "protocol/blob.h"
#include "protocol/round.h"

namespace torchkv::dist {

// Tensors of a list's slices in memories that have their values one after the
// other: a group for each slice, with one of each memory. Made once, as tensors
// cost more than the arithmetic on small values.
class TORCHKV_API ListViews {
 public:
  // REQUIRES: not empty, whole keys. Each memory has the slices' elements.
  ListViews(
      const std::vector<RoundPart>& parts,
      const std::vector<c10::ScalarType>& dtypes);

  // Whether the memories have these dtypes.
  bool are_of(const std::vector<c10::ScalarType>& dtypes) const {
    return dtypes_ == dtypes;
  }
  // Bytes of a memory.
  size_t num_bytes(size_t memory) const {
    return storages_[memory].nbytes();
  }
  // Where a memory is: a blob is kept until clear(), or the next one. REQUIRES:
  // num_bytes().
  void set(size_t memory, const Blob& values);
  void set(size_t memory, void* values);
  void clear();
  const Tensors& tensors() const {
    return tensors_;
  }

 private:
  std::vector<c10::ScalarType> dtypes_;
  std::vector<c10::Storage> storages_;
  Tensors tensors_;
};

} // namespace torchkv::dist

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>

#include "../device/runtime.h"
#include "../memory/meta.h"
#include "protocol/blob.h"

namespace torchkv::dist {

// Copies of pulled values to CUDA devices, on the calling thread's current
// streams there, through memory that PyTorch pins. Not from shared memory
// itself: the process that has it may give it back to the system, which a pin
// of this one does not prevent.
class DeviceCopies {
 public:
  explicit DeviceCopies(Runtime& runtime) : runtime_(runtime) {}

  // The pieces as one tensor, for add(). A device reads it while the next one
  // is made. Throws what check_size() throws.
  at::Tensor pinned(
      c10::ArrayRef<Blob> pieces,
      const Meta& meta,
      c10::Device device);
  // To an out of the same shape and dtype.
  void add(const at::Tensor& out, const at::Tensor& pinned);
  // Blocks the host until they are done.
  void wait();

 private:
  Runtime& runtime_;
  c10::SmallVector<c10::Device, 4> devices_;
  size_t num_bytes_ = 0; // pinned
};

} // namespace torchkv::dist

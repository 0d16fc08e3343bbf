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

  // Of the pieces of a value to outs of its shape and dtype. A part of it is
  // pinned once for all outs, which read it while the next part is. At most 80
  // MiB are pinned at a time or, if an out is not contiguous, the whole value.
  // Throws what check_size() throws.
  void add(
      c10::ArrayRef<Blob> pieces,
      const Meta& meta,
      c10::ArrayRef<at::Tensor> outs);
  // Blocks the host until they are done.
  void wait();

 private:
  at::Tensor pinned(
      c10::ArrayRef<Blob> pieces,
      c10::IntArrayRef sizes,
      c10::ScalarType dtype,
      c10::Device device);
  void copy(const at::Tensor& out, const at::Tensor& from);

  Runtime& runtime_;
  c10::SmallVector<c10::Device, 4> devices_; // with copies since wait()
  size_t num_bytes_ = 0; // pinned
};

} // namespace torchkv::dist

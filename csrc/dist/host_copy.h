#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "../core/export.h"
#include "../device/streams.h"
#include "buffers.h"

namespace torchkv::dist {

// Values on accelerators, on their way to CPU memory: from the thread that
// pushes them, which must not wait, to another that does.
class TORCHKV_API HostCopy {
 public:
  // Of the values that the tensors have after the work on the calling thread's
  // current streams. Nobody writes them meanwhile. Does not block.
  HostCopy(
      std::shared_ptr<Streams> streams,
      Buffers buffers, // with a runtime that pins
      std::vector<at::Tensor> tensors);

  // Copies of them, contiguous: in the buffers if other processes may read
  // those, else in PyTorch's pinned memory. Blocks the host until they are
  // there; the copies run on the streams' own. REQUIRES: called once.
  std::vector<at::Tensor> wait();

 private:
  // The work on a device that the copies wait for, then the copies.
  struct OfDevice {
    c10::Device device;
    std::shared_ptr<RuntimeEvent> event;
  };

  std::shared_ptr<Streams> streams_; // outlives the events
  Buffers buffers_;
  std::vector<at::Tensor> tensors_;
  std::vector<OfDevice> devices_;
};

} // namespace torchkv::dist

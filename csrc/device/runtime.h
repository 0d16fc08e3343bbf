#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <optional>

#include "../core/export.h"

namespace torchkv {

// A point in a stream that other streams can wait for. Each Runtime has its
// own.
struct RuntimeEvent {
  virtual ~RuntimeEvent() = default;
};

// The seam between the store and devices: streams, events, memory, copies.
// Arithmetic is elsewhere: kernels/, and ATen operators. The real one goes
// through c10's generic guards, so that one binary serves CPU and CUDA builds
// of torch; tests have a recording one. Any thread may call it.
class TORCHKV_API Runtime {
 public:
  virtual ~Runtime() = default;

  // The calling thread's current stream on `device`, an accelerator.
  virtual c10::Stream current_stream(c10::Device device) = 0;
  // A stream that is not the current one of any thread that did not ask for it.
  // It is to be kept: devices have a few dozen of them, which take turns.
  virtual c10::Stream new_stream(c10::Device device) = 0;
  // Makes `stream` the calling thread's current one on its device, and returns
  // the one before.
  virtual c10::Stream exchange_stream(c10::Stream stream) = 0;
  // Whether work on `stream` goes into a graph instead of being done.
  virtual bool is_capturing(c10::Stream stream) = 0;
  virtual std::unique_ptr<RuntimeEvent> make_event(c10::Device device) = 0;
  // Work enqueued on `stream` so far is what a later wait(event) waits for.
  // Does not block the host. REQUIRES: a stream of the event's device.
  virtual void record(RuntimeEvent& event, c10::Stream stream) = 0;
  // Work enqueued on `stream` from now on runs after what `event` recorded.
  // Does not block the host.
  virtual void wait(RuntimeEvent& event, c10::Stream stream) = 0;
  // Whether what `event` recorded is done. Does not block the host.
  virtual bool is_done(RuntimeEvent& event) = 0;
  // `tensor`, when freed, is not reused before what `stream` holds is done.
  virtual void keep_until_done(
      const at::Tensor& tensor,
      c10::Stream stream) = 0;

  // Uninitialised memory; a normal tensor in inference mode, too.
  virtual at::Tensor allocate(
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::ScalarType dtype,
      c10::Device device) = 0;
  // Converts, broadcasts nothing, crosses devices. Ordered on the current
  // streams of both; blocks the host only where a CPU tensor is on one side, or
  // two devices must not reach each other's memory.
  virtual void copy(
      const at::Tensor& destination,
      const at::Tensor& source) = 0;
};

// Makes it an error to resize the tensor's memory, through whatever tensor
// shares it. An updater could otherwise take the memory away from under a
// stored value.
TORCHKV_API void forbid_resize(const at::Tensor& tensor);

// Whether CUDA devices may reach each other's memory where they can: not with
// TORCHKV_P2P=0, for machines whose IOMMU lets such accesses go astray. Read at
// each call.
TORCHKV_API bool may_copy_directly();

// The real runtime; lives as long as the process.
TORCHKV_API Runtime& default_runtime();

// Where the last work on a slice of an entry was enqueued: the streams of
// several threads take turns. Guarded by the entry's mutex.
struct Timeline {
  std::optional<c10::Stream> stream; // none yet, or on the CPU
  std::shared_ptr<RuntimeEvent> event; // recorded there when it was
};

} // namespace torchkv

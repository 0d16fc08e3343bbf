#pragma once

#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <optional>

#include "../core/export.h"

namespace torchkv {

// A point in a stream that other streams can wait for. Each Runtime derives its
// own.
struct RuntimeEvent {
  virtual ~RuntimeEvent() = default;
};

// The seam between the store and devices: streams, events, memory, copies.
// Arithmetic is elsewhere: kernels/, and ATen operators. The default one uses
// c10's generic guards, so that one binary serves CPU and CUDA builds of torch;
// tests have a recording one. Thread-safe.
class TORCHKV_API Runtime {
 public:
  virtual ~Runtime() = default;

  // The calling thread's current stream on `device`, an accelerator.
  virtual c10::Stream current_stream(c10::Device device) = 0;
  // A stream of PyTorch's pool. Keep it: the pool has a few dozen streams,
  // which it hands out round-robin.
  virtual c10::Stream new_stream(c10::Device device) = 0;
  // Makes `stream` the calling thread's current one on its device, and returns
  // the previous one.
  virtual c10::Stream exchange_stream(c10::Stream stream) = 0;
  // Whether `stream` is being captured into a graph.
  virtual bool is_capturing(c10::Stream stream) = 0;
  virtual std::unique_ptr<RuntimeEvent> make_event(c10::Device device) = 0;
  // Records the work enqueued on `stream` so far. Does not block the host.
  // REQUIRES: a stream of the event's device.
  virtual void record(RuntimeEvent& event, c10::Stream stream) = 0;
  // Makes later work on `stream` wait for what `event` recorded. Does not block
  // the host.
  virtual void wait(RuntimeEvent& event, c10::Stream stream) = 0;
  // Whether the work recorded by `event` is done. Does not block the host.
  virtual bool is_done(RuntimeEvent& event) = 0;
  // Blocks the host until it is.
  virtual void synchronize(RuntimeEvent& event) = 0;
  // Once freed, `tensor`'s memory is not reused until `stream`'s work is done.
  virtual void keep_until_done(
      const at::Tensor& tensor,
      c10::Stream stream) = 0;

  // Uninitialised memory; a normal tensor even in inference mode.
  virtual at::Tensor allocate(
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::ScalarType dtype,
      c10::Device device) = 0;
  // The same with the shape, the strides and the device of a tensor.
  at::Tensor allocate_like(const at::Tensor& model, c10::ScalarType dtype) {
    return allocate(model.sizes(), model.strides(), dtype, model.device());
  }
  // Copies across dtypes and devices, without broadcasting. Ordered on the
  // current streams of both; blocks the host only if one tensor is on the CPU
  // or two devices must not use peer access.
  virtual void copy(
      const at::Tensor& destination,
      const at::Tensor& source) = 0;
  // The tensor itself if it has this device and dtype, or a contiguous copy.
  at::Tensor moved(
      const at::Tensor& tensor,
      c10::Device device,
      c10::ScalarType dtype) {
    if (tensor.device() == device && tensor.scalar_type() == dtype) {
      return tensor;
    }
    at::Tensor copied = allocate(
        tensor.sizes(),
        at::detail::defaultStrides(tensor.sizes()),
        dtype,
        device);
    copy(copied, tensor);
    return copied;
  }
  // CPU memory, pinned if `device` is a CUDA device.
  virtual at::Tensor allocate_on_host(
      c10::IntArrayRef sizes,
      c10::ScalarType dtype,
      c10::Device device) = 0;
  // Pins memory of the host until the result is destroyed; whole pages, of
  // which no other is pinned. Null if the device cannot or need not.
  virtual std::shared_ptr<void> pin(
      void* data,
      size_t size,
      c10::Device device) = 0;
  // Enqueues a copy between CPU memory and an accelerator, of one dtype, on the
  // accelerator's current stream. Blocks the host only if the CPU memory is not
  // pinned. Keep both until it is done, but for what allocate_on_host() has
  // returned for a CUDA device.
  virtual void copy_pinned(
      const at::Tensor& destination,
      const at::Tensor& source) = 0;
};

// Makes the tensor's storage, however it is shared, impossible to resize. An
// updater could otherwise free the memory of a stored value.
TORCHKV_API void forbid_resize(const at::Tensor& tensor);

// Whether CUDA devices may use peer access. TORCHKV_P2P=0 disables it, for
// machines whose IOMMU misdirects such accesses. Read at each call.
TORCHKV_API bool may_copy_directly();

// Whether kernels on `device` may use memory of `peer`, CUDA devices both. The
// first call for a pair enables peer access and synchronizes both devices;
// later calls are a lookup without a lock, for the life of the process. Always
// false with TORCHKV_P2P=0. Thread-safe.
TORCHKV_API bool may_use_peer(
    Runtime& runtime,
    c10::Device device,
    c10::Device peer);

// For tests: forgets the results.
TORCHKV_API void forget_peers();

// The default runtime; lives as long as the process.
TORCHKV_API Runtime& default_runtime();

// Where the last work on a slice was enqueued: threads may use different
// streams. Guarded by the entry's mutex.
struct Timeline {
  std::optional<c10::Stream> stream; // none yet, or on the CPU
  std::shared_ptr<RuntimeEvent> event; // recorded there after it
};

} // namespace torchkv

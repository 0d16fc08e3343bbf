#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <vector>

#include "../core/export.h"
#include "streams.h"
#include "work.h"

namespace torchkv {

// Makes a synchronous call asynchronous: between enter() and finish(), a
// store's streams are the calling thread's current ones, so that whatever is
// enqueued goes there. Without a finish() (an error), the caller's streams wait
// for it when the scope ends, as in a synchronous call. Not thread-safe.
class TORCHKV_API AsyncScope {
 public:
  explicit AsyncScope(Streams& streams) : streams_(streams) {}
  ~AsyncScope();
  AsyncScope(const AsyncScope&) = delete;
  AsyncScope& operator=(const AsyncScope&) = delete;

  // Enters an accelerator, or those of `tensors`, which the Work will hold. The
  // store's streams wait for the work already on the caller's.
  void enter(c10::Device device);
  void enter(c10::ArrayRef<at::Tensor> tensors);

  // Makes the caller's streams current again.
  WorkPtr finish();

 private:
  void leave();

  Streams& streams_;
  Work::Parts parts_;
  std::vector<at::Tensor> tensors_;
};

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <initializer_list>
#include <mutex>
#include <vector>

#include "../core/export.h"
#include "../store/arguments.h"
#include "runtime.h"
#include "stream_order.h"
#include "work.h"

namespace torchkv {

// A store's streams for asynchronous calls, one for each accelerator, so that
// these calls stay in order. Any thread. The runtime outlives it.
class TORCHKV_API CommStreams {
 public:
  explicit CommStreams(Runtime& runtime_) : runtime(runtime_) {}

  // Made when it is first asked for.
  c10::Stream on(c10::Device device);

  Runtime& runtime;
  EventPool events{runtime};

 private:
  std::mutex mutex_; // guards streams_
  c10::SmallVector<c10::Stream, 1> streams_;
};

// Makes a synchronous call asynchronous: between enter() and finish(), a
// store's streams are the calling thread's current ones, so that whatever is
// enqueued goes there. Without a finish() (an error), the caller's streams wait
// for it when the scope ends, as a synchronous call's would have. One thread.
class TORCHKV_API AsyncScope {
 public:
  explicit AsyncScope(CommStreams& streams) : streams_(streams) {}
  ~AsyncScope();
  AsyncScope(const AsyncScope&) = delete;
  AsyncScope& operator=(const AsyncScope&) = delete;
  AsyncScope(AsyncScope&&) = delete;
  AsyncScope& operator=(AsyncScope&&) = delete;

  // On the accelerators of the tensors and of what is stored in the entries.
  // The store's streams go on after what the caller's hold now.
  // REQUIRES: the calling thread holds no entry's mutex.
  void enter(
      const Entries& entries,
      std::initializer_list<const Tensors*> tensors);

  // The caller's streams are the current ones again.
  WorkPtr finish();

 private:
  void enter(c10::Device device);
  void leave();

  CommStreams& streams_;
  Work::Parts parts_;
  std::vector<at::Tensor> tensors_;
};

} // namespace torchkv

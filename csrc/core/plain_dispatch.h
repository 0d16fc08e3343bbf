#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "export.h"

namespace torchkv {

// RAII guard: operators of this thread dispatch directly to their kernels,
// below autograd (nothing is recorded, no version is bumped) and past modes and
// transforms of the caller such as FakeTensorMode and torch.func, which must
// not intercept the store's own work. In a forked child they also stay on this
// thread: OpenMP would wait for the threads of the parent process. Not active
// while an updater runs.
class TORCHKV_API PlainDispatch {
 public:
  PlainDispatch();
  ~PlainDispatch();
  PlainDispatch(const PlainDispatch&) = delete;
  PlainDispatch& operator=(const PlainDispatch&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_;
  int num_threads_ = 0; // to restore in a forked child
};

} // namespace torchkv

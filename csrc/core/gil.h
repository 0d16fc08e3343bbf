#pragma once

#include "export.h"

namespace torchkv {

// How to let go of Python's global lock, for code that knows no Python. The
// Python door sets it at import; without it there is no lock to let go of.
struct GilHooks {
  // Releases the lock where this thread holds it; what restore() needs to take
  // it again, or null where it was not held.
  void* (*release)() = nullptr;
  void (*restore)(void* state) = nullptr;
};

TORCHKV_API void set_gil_hooks(GilHooks hooks);

// Releases the lock for its life, where this thread holds it. For the calls
// that PyTorch makes with the lock held (torch.jit.save, copy.deepcopy):
// waiting for an entry would otherwise wait for an updater that waits for the
// lock.
class TORCHKV_API ReleaseGil {
 public:
  ReleaseGil();
  ~ReleaseGil();
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;
  ReleaseGil(ReleaseGil&&) = delete;
  ReleaseGil& operator=(ReleaseGil&&) = delete;

 private:
  void* state_;
};

} // namespace torchkv

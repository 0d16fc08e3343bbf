#pragma once

#include "export.h"

namespace torchkv {

// Releases the GIL for code that does not include Python. Set by the Python
// binding at import; not set in processes without Python.
struct GilHooks {
  // Releases the GIL if this thread holds it. Returns what restore() needs to
  // acquire it again, or null if it was not held.
  void* (*release)() = nullptr;
  void (*restore)(void* state) = nullptr;
};

TORCHKV_API void set_gil_hooks(GilHooks hooks);

// RAII guard: releases the GIL if this thread holds it. For calls that PyTorch
// makes with the GIL held (torch.jit.save, copy.deepcopy), which could deadlock
// with an updater that holds an entry and needs the GIL.
class TORCHKV_API ReleaseGil {
 public:
  ReleaseGil();
  ~ReleaseGil();
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  void* state_;
};

} // namespace torchkv

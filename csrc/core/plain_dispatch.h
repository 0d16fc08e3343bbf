#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchkv {

// RAII guard: operators of this thread dispatch directly to their kernels,
// below autograd (nothing is recorded, no version is bumped) and past modes and
// transforms of the caller such as FakeTensorMode and torch.func, which must
// not intercept the store's own work. Not active while an updater runs.
class PlainDispatch {
 public:
  PlainDispatch() : excluded_(keys()) {}

 private:
  static c10::DispatchKeySet keys() {
    return c10::autograd_dispatch_keyset_with_ADInplaceOrView |
        c10::DispatchKeySet(
               {c10::DispatchKey::Python,
                c10::DispatchKey::PythonTLSSnapshot,
                c10::DispatchKey::PythonDispatcher,
                c10::DispatchKey::Functionalize,
                c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                c10::DispatchKey::FuncTorchVmapMode,
                c10::DispatchKey::FuncTorchBatched,
                c10::DispatchKey::FuncTorchGradWrapper});
  }

  c10::impl::ExcludeDispatchKeyGuard excluded_;
};

} // namespace torchkv

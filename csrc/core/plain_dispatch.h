#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchkv {

// While it lives, operators of this thread go straight to their kernels: below
// autograd (nothing is recorded, no version is counted) and past whatever the
// caller has switched on around the call, such as a FakeTensorMode or a
// torch.func transform. The store's own work must neither be seen nor turned
// into something else by these. An updater runs without it.
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

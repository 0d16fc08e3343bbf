#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

namespace torchkv {

// Throws RuntimeError for a call of a store while a graph is recorded. `tracer`
// is PyTorch's name of what records it, and `instead` what to write instead.
[[noreturn]] inline void throw_traced(
    const char* op,
    const char* tracer,
    const char* instead =
        "script the module that holds it (torch.jit.script), as the store itself or as store.script_object") {
  TORCH_CHECK(
      false,
      op,
      ": unexpected call while ",
      tracer,
      " records a graph, which would lose pushes and turn pulled values into "
      "constants; call the store outside of the traced code, or ",
      instead);
}

// Throws it while make_fx or torch.export records the calling thread: a store's
// calls are not recorded, so pushes would be lost and pulled values become
// constants.
inline void refuse_graph_capture(const char* op) {
  using c10::impl::TorchDispatchModeTLS;
  const bool is_recorded = (TorchDispatchModeTLS::any_modes_set() &&
                            TorchDispatchModeTLS::get_mode(
                                c10::impl::TorchDispatchModeKey::PROXY)) ||
      // make_fx(pre_dispatch=True) keeps its modes in Python.
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PreDispatch);
  if (is_recorded) {
    throw_traced(op, "make_fx or torch.export");
  }
}

} // namespace torchkv

#include "tracing.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

namespace torchkv {

void throw_traced(const char* op, const char* tracer, const char* instead) {
  TORCH_CHECK(
      false,
      op,
      ": unexpected call while ",
      tracer,
      " records a graph, which would lose pushes and turn pulled values into "
      "constants; call the store outside of the traced code, or ",
      instead);
}

void refuse_graph_capture(const char* op) {
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

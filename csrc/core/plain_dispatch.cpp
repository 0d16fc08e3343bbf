#include "plain_dispatch.h"

#include <ATen/Parallel.h>
#include <c10/core/DispatchKeySet.h>

#include "process.h"

namespace torchkv {
namespace {

c10::DispatchKeySet excluded_keys() {
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

// Of this thread. Not at::set_num_threads, which changes other threads, too.
void set_num_threads([[maybe_unused]] int num_threads) {
#ifdef _OPENMP
  omp_set_num_threads(num_threads);
#endif
}

} // namespace

PlainDispatch::PlainDispatch() : excluded_(excluded_keys()) {
  if (fork_count() != 0) {
    num_threads_ = at::get_num_threads();
    set_num_threads(1);
  }
}

PlainDispatch::~PlainDispatch() {
  if (num_threads_ != 0) {
    set_num_threads(num_threads_);
  }
}

} // namespace torchkv

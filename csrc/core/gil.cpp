#include "gil.h"

namespace torchkv {
namespace {

// Set once, when the Python binding is imported, before any store exists.
GilHooks& gil_hooks() {
  static GilHooks hooks;
  return hooks;
}

} // namespace

void set_gil_hooks(GilHooks hooks) {
  gil_hooks() = hooks;
}

ReleaseGil::ReleaseGil()
    : state_(gil_hooks().release == nullptr ? nullptr : gil_hooks().release()) {
}

ReleaseGil::~ReleaseGil() {
  if (state_ != nullptr) {
    gil_hooks().restore(state_);
  }
}

} // namespace torchkv

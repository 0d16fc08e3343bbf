// A library that, once loaded, puts a ForwardingStore before all stores that do
// not need devices. `make forward-test` runs Python's tests with it.
#include "forwarding_store.h"

namespace torchkv::testing {
namespace {

[[maybe_unused]] const bool is_registered = [] {
  forward_stores_of("local");
  forward_stores_of("device");
  return true;
}();

} // namespace
} // namespace torchkv::testing

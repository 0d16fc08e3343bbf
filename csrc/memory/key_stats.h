#pragma once

#include <cstdint>

namespace torchkv {

// What calls have done with a key since its init. Times are those of the host,
// in seconds: on accelerators the time to enqueue work. A call of several keys
// divides its time among them by their bytes.
struct KeyStats {
  int64_t pushes = 0;
  int64_t pulls = 0;
  int64_t bytes_pushed = 0; // of the tensors of all replicas
  int64_t bytes_pulled = 0;
  double sum_seconds = 0; // adding up values
  // In the updater; built-in optimizers add up in the same pass.
  double update_seconds = 0;
  double copy_seconds = 0; // to outs
};

} // namespace torchkv

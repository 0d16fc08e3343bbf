#pragma once

#include <mutex>
#include <vector>

#include "../store/local_store.h"
#include "buffers.h"

namespace torchkv::dist {

// Sums the values that a process pushes for each key, so that one value leaves
// it, in memory that may travel while the caller overwrites its own.
// Thread-safe.
class Staging {
 public:
  struct Sum {
    Key key;
    at::Tensor value; // contiguous, on the CPU; not written while it exists
  };

  Staging(Runtime& runtime, Buffers buffers);

  // One sum for each distinct key, in the order in which they first appear. One
  // value keeps its dtype; several are added left to right and have the
  // accumulation type of theirs and the stored dtype. `dtypes` has the stored
  // dtype of each key of the call. REQUIRES: a checked call.
  std::vector<Sum> sum(const Call& call, c10::ArrayRef<c10::ScalarType> dtypes);
  void erase(const Keys& keys);

 private:
  const Buffers buffers_;
  std::mutex mutex_; // held from a push to the lease of its sums
  LocalStore store_;
};

} // namespace torchkv::dist

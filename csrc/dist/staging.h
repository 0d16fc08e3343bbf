#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../store/local_store.h"
#include "buffers.h"
#include "download.h"

namespace torchkv::dist {

// Sums the values that a process pushes for each key, so that one value leaves
// it, in memory that may travel while the caller overwrites its own. Values on
// accelerators are summed there, on the calling thread's current streams, which
// does not block the host. Thread-safe.
class TORCHKV_API Staging {
 public:
  struct Sum {
    Key key;
    // Contiguous; not written while it exists. On an accelerator if a value is:
    // then download() brings it.
    at::Tensor value;
  };

  Staging(Runtime& runtime, Buffers buffers);

  // One sum for each distinct key, in the order in which they first appear. One
  // value keeps its dtype; several are added left to right and have the
  // accumulation type of theirs and the stored dtype. `dtypes` has the stored
  // dtype of each key of the call. REQUIRES: a checked call.
  std::vector<Sum> sum(const Call& call, c10::ArrayRef<c10::ScalarType> dtypes);
  // Of sums on accelerators, by the thread that has summed them.
  Download download(std::vector<at::Tensor> sums) const;
  void erase(const Keys& keys);

 private:
  struct Group;
  using Groups = std::unordered_map<Key, Group, KeyHash>;
  void sum_in(LocalStore& store, const Call& call, const Groups& groups);
  // Those of the keys whose values are on accelerators.
  void sum_on_devices(
      const Call& call,
      const Groups& groups,
      std::unordered_map<Key, at::Tensor, KeyHash>& sums);

  Runtime& runtime_;
  const Buffers buffers_;
  const std::shared_ptr<Streams> streams_; // of downloads
  std::mutex mutex_; // held from a push to the lease of its sums
  LocalStore store_;
  LocalStore device_store_; // of keys with several values
};

} // namespace torchkv::dist

#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../core/row_sparse.h"
#include "../store/local_store.h"
#include "buffers.h"
#include "caller_values.h"
#include "host_copy.h"
#include "protocol/slice.h"

namespace torchkv::dist {

// Sums the values that a process pushes for each key, so that one value leaves
// it, in memory that may travel while the caller overwrites its own. Values on
// accelerators are summed there, on the calling thread's current streams; the
// host is blocked only where other values of the key are on the CPU.
// Thread-safe.
class TORCHKV_API Staging {
 public:
  struct Sum {
    Key key;
    size_t number; // of the key in the call, where it first appears
    // Contiguous; not written while it exists, unless it is the caller's. On an
    // accelerator if a value is: then copy_to_host() brings it.
    at::Tensor value;
    // If not empty: the value where the caller has it. Then `value` has only
    // what other servers need.
    Blob own;
    // If the key's values are all sparse: which rows of it `value` has, then in
    // CPU memory and perhaps the caller's. Not more than the key has.
    std::shared_ptr<const RowSparse> rows;
  };
  // Of single contiguous values on the CPU, which need no copy.
  struct InPlace {
    // Of a key of the call: whether its sum is read before the call returns,
    // to compress it; then the sum may be the caller's tensor.
    c10::function_ref<bool(size_t)> is_read_now;
    // If the call waits until its values are merged; else null.
    CallerValues::OfCall* values;
    // Of a key of the call: the out that CallerValues may write, or undefined.
    c10::function_ref<at::Tensor(size_t)> out_of;
    // The slices on other servers of a key of the call.
    c10::function_ref<std::vector<Place>(size_t)> elsewhere;
  };

  // In `memory`, as Buffers.
  Staging(Runtime& runtime, const std::shared_ptr<SharedMemory>& memory);

  // One sum for each distinct key, in the order in which they first appear. One
  // value keeps its dtype; several are added left to right and have the
  // accumulation type of theirs and the stored dtype. `dtypes` has the stored
  // dtype of each key of the call. `rows`: of with_rows(), or null. REQUIRES: a
  // checked call.
  std::vector<Sum> sum(
      const Call& call,
      const Tensors* rows,
      c10::ArrayRef<c10::ScalarType> dtypes,
      const InPlace& in_place);
  // Of sums on accelerators, by the thread that has summed them.
  HostCopy copy_to_host(std::vector<at::Tensor> sums) const;
  void erase(const Keys& keys);
  const Buffers& buffers() const {
    return buffers_;
  }

 private:
  struct Group;
  struct PartOfCall;
  using Groups = ska::flat_hash_map<Key, Group, KeyHash>;
  void sum_in(LocalStore& store, const Call& call, const Groups& groups);
  // Of the keys whose values are all sparse; returns the rest of the call.
  PartOfCall sum_rows(
      const Call& call,
      const Tensors& rows,
      const Groups& groups,
      std::vector<Sum>& sums);
  void sum_rows_of(const Call& call, const Group& group, Sum& sum);
  // Fills in those sums that are read in place; the rest of the call.
  PartOfCall read_in_place(
      const Call& call,
      const Groups& groups,
      const InPlace& in_place,
      std::vector<Sum>& sums);
  at::Tensor copy_of(const Key& key, const Group& group);
  // Those of the keys whose values are on accelerators.
  void sum_on_devices(
      const Call& call,
      const Groups& groups,
      std::unordered_map<Key, at::Tensor, KeyHash>& sums);

  Runtime& runtime_;
  const Buffers buffers_;
  const Buffers pinned_; // of copies from accelerators
  const std::shared_ptr<Streams> streams_; // of copies to the host
  std::mutex mutex_; // held from a push to the lease of its sums
  LocalStore store_;
  LocalStore device_store_; // of keys with several values
  LocalStore row_store_; // of keys with several sparse values
  // Of single values for other servers: kept, as in store_, since memory that
  // is fresh from the system is slow.
  std::unordered_map<Key, at::Tensor, KeyHash> copies_;
};

} // namespace torchkv::dist

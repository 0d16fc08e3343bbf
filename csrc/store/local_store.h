#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../comm/reducer.h"
#include "../core/export.h"
#include "../device/async_scope.h"
#include "../device/streams.h"
#include "../memory/placement.h"
#include "../memory/slices.h"
#include "batch.h"
#include "key_table.h"
#include "optimizer_step.h"
#include "store.h"

namespace torchkv {

// A store in the memory of this process: the pipeline find -> check -> group ->
// reduce and update, and pull.
//
// Invariants:
// 1. A stored value never aliases a tensor of the caller (except a lease,
//    and one that init or assign shares); pushed tensors are only read, and not
//    after the call or, if it is asynchronous, its work.
// 2. A call waits for an entry's mutex only while it holds no other; more, for
//    one pass over many keys, it takes only where they are free. An updater's
//    it takes after its one entry's. So the calls of one store cannot wait for
//    each other in a circle. Calls of two stores can, where the updater of each
//    calls the other store.
class TORCHKV_API LocalStore final : public Store {
 public:
  struct Options {
    Placement::Policy policy = Placement::Policy::kCpu;
    bool nccl = false; // for communication between GPUs
    std::string places; // as TORCHKV_PLACES
    Allocator allocator; // of stored values; empty: the runtime's
    OptimizerStep::Combine combine;
  };

  // The runtime outlives the store.
  LocalStore(Runtime& runtime, Options options);

  WorkPtr insert(const Call& call) override;
  WorkPtr merge(const Call& call) override;
  WorkPtr pull(const Call& call) override;
  std::vector<at::Tensor> pull(const Keys& keys, const CallOptions& options)
      override;
  void pull_rows(const char* op, c10::ArrayRef<RowPull> pulls) override;
  c10::Device row_device(const char* op, const Key& key) const override;
  void init_rows(const Key& key, const Meta& meta, const RowInit& init)
      override;
  int64_t num_rows(const char* op, const Key& key) const override;
  void erase_rows(
      const char* op,
      const Keys& keys,
      c10::ArrayRef<at::Tensor> ids) override;
  void assign(const Call& call) override;
  void erase(const Keys& keys) override;

  int64_t version(const Key& key) override;
  std::vector<KeyStats> stats(const Keys& keys) override;
  std::vector<Key> keys() const override;
  std::optional<Meta> meta(const char* op, const Key& key) const override;
  StoreStatus status() const override;
  Updater updater() const override;

  void set_compression(const Compression& compression) override;
  CompressionPtr compression() const override;
  void set_updater(std::shared_ptr<OpaqueUpdater> updater) override;
  uint64_t set_optimizer(Optimizer optimizer, bool keep_state, bool check_keys)
      override;
  void expect_keys(const Keys& keys) override;
  int64_t num_steps() override;
  std::vector<KeyState> optimizer_states(const Keys& keys) override;
  void set_optimizer_states(
      const Keys& keys,
      const std::vector<KeyState>& states) override;

  StoreState state(bool with_keys, bool with_updater) const override;
  void load(StoreState state) override;
  void take(Store& other, bool keeps_updater) override;
  void visit_sole_updater(
      c10::function_ref<void(const OpaqueUpdater&)> visit) const override;
  void barrier() override;
  void close() override;

  // For servers that hold a LocalStore:

  // Says at which element of a larger value this one begins. REQUIRES: before
  // its first update.
  void set_offset(const Key& key, int64_t offset);

  // merge with an updater that need not be the one that is set, such as that of
  // the round which the values belong to. Generations of optimizers are
  // compared as in merge.
  // `own_outs`, of a call without outs: none or more for each key, in CPU
  // memory, as check_outs() and can_write_with_sums() require; they get the new
  // values in the pass that makes them. Not for opaque updaters.
  WorkPtr apply(
      const Call& call,
      const Updater& updater,
      const Tensors* own_outs = nullptr);
  void assign(const Call& call, const Updater& updater);

  // As OptimizerStep: the norm of the gradients, which changes nothing, and a
  // push of them with the factor that the norms of all servers lead to.
  // REQUIRES: an optimizer.
  double measure(const Call& call, const Updater& updater);
  void apply(
      const Call& call,
      const Updater& updater,
      double factor,
      const Tensors* own_outs = nullptr);

  // A copy of what the updater, an optimizer or not, keeps for a key, which
  // nobody else changes meanwhile: others may read it; and the way back.
  // REQUIRES: a state of this optimizer and the key's shape.
  KeyState state_of(const Key& key, const Updater& updater) const;
  void set_state_of(
      const Key& key,
      const Updater& updater,
      const KeyState& state);

  // The value and the number of its updates, at one moment. The store does not
  // write the tensor while it, or another tensor on its storage, exists: the
  // next update moves the value to other memory. REQUIRES: nobody writes the
  // tensor.
  std::pair<at::Tensor, int64_t> lease(const Key& key);

  // Of a row-sparse key, in the order in which they are stored: its rows, which
  // nobody changes while the caller reads them, and a copy of their ids; a copy
  // of as many of the ids as there are in a range.
  struct StoredRows {
    at::Tensor ids;
    at::Tensor values;
  };
  StoredRows rows_by_slot(const Key& key) const;
  at::Tensor ids_by_slot(const Key& key, int64_t begin, int64_t count) const;

 private:
  OptimizerPtr optimizer(const char* op) const;
  OptimizerPtr current_optimizer() const;
  // Frees the state of optimizers before `generation`.
  void replace_updater(
      const char* op,
      Updater next,
      uint64_t generation,
      std::vector<Key> expected = {});
  Entries find(const Call& call, const Updater& updater) const;
  // Whether all tensors are usual, as check_values() and check_outs() say.
  bool check(const Call& call, const Entries& entries, const Updater& updater)
      const;
  Entries make_entries(const Call& call) const;
  void enter(
      std::optional<AsyncScope>& scope,
      const Call& call,
      const Entries& entries) const;
  static void check_min_version(const Call& call, const Entries& entries);
  void update(const Groups& values, const Updater& updater);
  void assign_sums(const Groups& values);
  void update_one_by_one(const Groups& values, OpaqueUpdater& opaque);
  // Of the key of a batch of one, whose values are row-sparse. Returns the
  // seconds that the updater took. REQUIRES: its mutex.
  double update_rows(Batch& batch, OpaqueUpdater& opaque);
  // Of a row-sparse key, with copies of the rows that the input has.
  static void update_own_rows(
      Entry& entry,
      OpaqueUpdater& opaque,
      const at::Tensor& ids, // of the rows
      at::Tensor& input,
      at::Tensor& stored);
  void copy_out(const Groups& outs) const;
  // The same for one row-sparse value. REQUIRES: its mutex.
  void copy_to_dense(Entry& entry, c10::ArrayRef<at::Tensor> outs) const;
  // What a sparse out gets of a value of any kind; ValueError unless it has all
  // rows. REQUIRES: its mutex is free.
  at::Tensor sparse_for(Entry& entry, const at::Tensor& out) const;
  // That, which took so many seconds. REQUIRES: its mutex is free.
  static void copy_to_sparse(
      Entry& entry,
      const at::Tensor& value,
      const at::Tensor& out,
      double seconds);
  // Replaces the rows of a row-sparse value; new ones begin with the state that
  // `updater` begins with. REQUIRES: its mutex.
  void replace_rows(const Groups& values, size_t i, const Updater& updater);
  // Adds a key without rows.
  EntryPtr insert_rows(const Key& key, const Meta& meta, const RowInit& init);
  // assign, where the tensors become the stored values.
  void share(const Call& call, const Entries& entries);
  // REQUIRES: updater_mutex_.
  void set_expected_keys(std::vector<Key> keys);
  void check_expected_keys(const char* op);
  KeyState state_of(Entry& entry, const Optimizer& optimizer) const;
  void set_optimizer_states(
      const Keys& keys,
      const std::vector<KeyState>& states,
      bool by_slot);
  void load_rows(
      const Key& key,
      const Tensors& value,
      const StoreState::Rows& rows);
  // If the state has a compression. REQUIRES: the entry's mutex.
  void save_residuals(Entry& entry, StoreState& state) const;
  // Frees stale residuals of keys that no call holds.
  void replace_compression(
      const char* op,
      const Compression& compression,
      std::vector<Key> expected);
  // In a new store with these keys.
  void load_compression(const StoreState& state, const Keys& keys);

  const bool only_cpu_; // where values live
  std::atomic<bool> has_shared_{false}; // whether a value was ever shared
  std::atomic<bool> has_row_sparse_{false}; // the same of row-sparse values

  // These have synchronization of their own; a const call may move values.
  mutable Streams streams_;
  mutable Slices slices_;
  mutable Placement placement_;
  mutable Reducer reducer_;
  OptimizerStep optimizer_step_;
  KeyTable table_;

  // Guards updater_, not what it points to, and keeps its kind of keys that of
  // the table. Taken before the table's lock.
  mutable std::mutex updater_mutex_;
  Updater updater_;
  CompressionPtr compression_; // guarded by updater_mutex_; null: none
  std::atomic<bool> compresses_{false}; // whether it is not null
  // Both guarded by updater_mutex_: of the updater, and of the compression.
  std::vector<Key> expected_keys_;
  std::vector<Key> compression_keys_;
  std::atomic<bool> expects_keys_{false}; // whether there are any
  std::atomic<bool> may_shard_{true}; // is_elementwise(updater_)
};

} // namespace torchkv

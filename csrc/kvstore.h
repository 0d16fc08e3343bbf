#pragma once

#include "core/export.h" // first: it checks the version of torch

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <torch/custom_class.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "device/async_scope.h"
#include "device/runtime.h"
#include "device/work.h"
#include "store/arguments.h"
#include "store/key_table.h"
#include "store/state.h"
#include "store/type.h"
#include "update/updater.h"

namespace torchkv {

// A key-value store of tensors. Python, TorchScript and C++ hold the same
// object; this class is the C++ door and what the two others call.
//
// Thread safety: any thread may call any method at any time. A push is atomic
// per key. REQUIRES for all methods: the calling thread does not hold the GIL.
//
// Invariants:
// 1. A stored value never aliases a tensor of the caller; pushed tensors are
//    only read, and not after the call or, if it is asynchronous, its work.
// 2. A call that is refused has changed nothing. Only an updater that throws
//    leaves the keys before its own updated.
// 3. A call waits for an entry's mutex only while it holds no other; more, for
//    one pass over many keys, it takes only where they are free. An updater's
//    it takes after its one entry's. So the calls of one store cannot wait for
//    each other in a circle. Calls of two stores can, where the updater of each
//    calls the other store.
//
// Errors of every method besides its own: RuntimeError after close(), in a
// forked child of the process that made the store, and from inside an updater
// that this store is running; close(), repr() and key_kind() go on after
// close(). All messages name the operation and, where there is one, the key.
//
// Tensors on accelerators: work is enqueued on the calling thread's current
// streams and the host is not blocked, except for copies to and from CPU
// memory. The methods *_async check their arguments and throw as the others,
// but enqueue on streams of the store's own, which go on after what the caller
// has enqueued; the Work that they return (never null) says what the caller may
// do until it has waited. Calls of either kind on one key take effect in order.
class TORCHKV_API KVStore : public torch::CustomClassHolder {
 public:
  // As parse_store_type. The runtime outlives the store.
  explicit KVStore(
      const std::string& type = "local",
      Runtime& runtime = default_runtime());

  // "local", "device" or "nccl". Never throws.
  const char* type() const {
    return name(type_);
  }

  // Makes each key's value a copy of its one tensor. ValueError where a key is
  // there already or stands twice, TypeError where the kinds of keys differ.
  void init(const Keys& keys, const Tensors& values);

  // Adds up each key's tensors, left to right, and hands the sum to the
  // updater, once per distinct key, in the order in which the keys first
  // appear. A larger priority goes first among operations that wait; a store on
  // one machine has none that wait.
  void push(const Keys& keys, const Tensors& values, int64_t priority = 0);
  WorkPtr push_async(
      const Keys& keys,
      const Tensors& values,
      int64_t priority = 0);

  // Writes each key's value into all its tensors, in place.
  // Where outs of several keys share memory, the last key counts.
  void pull(const Keys& keys, const Tensors& outs, int64_t priority = 0) const;
  WorkPtr pull_async(
      const Keys& keys,
      const Tensors& outs,
      int64_t priority = 0) const;
  // A new tensor for each key, with the stored dtype, strides and device.
  std::vector<at::Tensor> pull(const Keys& keys, int64_t priority = 0) const;

  // push, then pull. Everything is checked before anything is pushed.
  void pushpull(
      const Keys& keys,
      const Tensors& values,
      const Tensors& outs,
      int64_t priority = 0);
  WorkPtr pushpull_async(
      const Keys& keys,
      const Tensors& values,
      const Tensors& outs,
      int64_t priority = 0);

  // init, then pull. Everything is checked before anything is stored.
  void broadcast(
      const Keys& keys,
      const Tensors& values,
      const Tensors& outs,
      int64_t priority = 0);
  WorkPtr broadcast_async(
      const Keys& keys,
      const Tensors& values,
      const Tensors& outs,
      int64_t priority = 0);

  // Forgets the keys; they may be initialised anew, with another shape.
  void erase(const Keys& keys);

  bool contains(const Key& key) const;
  int64_t size() const;
  // In order of init.
  std::vector<Key> keys() const;
  // None before the first init.
  std::optional<KeyKind> key_kind() const;
  std::vector<int64_t> shape(const Key& key) const;
  c10::ScalarType dtype(const Key& key) const;

  // Changes no value. A null pointer restores ASSIGN. TypeError where it cannot
  // take the store's kind of keys. A push in flight keeps using the old
  // updater. An updater must not call this store (RuntimeError), nor wait for
  // another thread that does: that thread waits for the entry's mutex until the
  // updater returns.
  void set_updater(std::shared_ptr<OpaqueUpdater> updater);

  // Makes a built-in optimizer the updater: pushed values are gradients, whose
  // sum moves the stored value, in the pass that adds them up. Changes no
  // value. With `keep_state` it is the optimizer that is set already, with
  // other numbers; else all keys start without state. ValueError for numbers
  // that make no sense. From then on TypeError by push where a key's dtype is
  // neither floating-point nor complex. Returns the optimizer's identity.
  // A push in flight keeps using the old optimizer, except for keys already
  // updated by the new one. Stale state is freed immediately, or at the key's
  // next push if the key is locked.
  // With `check_keys`, keys with options of their own must be keys of the
  // store: UnknownKeyError or, in a store without keys, as expect_keys. Keys
  // that the optimizer being replaced by `keep_state` had are not checked.
  uint64_t set_optimizer(
      Optimizer optimizer,
      bool keep_state = false,
      bool check_keys = true);
  // The same by name; see make_optimizer. Where the store has an optimizer of
  // this name, only its numbers change: each key's state and options stay, and
  // so do the groups after the first. So a schedule calls this at each step.
  uint64_t set_optimizer(
      const std::string& name,
      const NumbersByName& numbers = {});
  // The first push from now on throws UnknownKeyError, and changes nothing, as
  // long as one of these is not a key of the store. Replaces the keys of an
  // earlier call; another updater or optimizer clears them.
  void expect_keys(const Keys& keys);
  // Those that no push has found yet.
  std::vector<Key> expected_keys() const;
  // What merges pushes now.
  Updater current_updater() const;
  // Calls without a step, because a gradient was not finite.
  int64_t num_skipped() const;
  // The 2-norm of the gradients of the last push that made a step, all its keys
  // together, before max_norm limited it. None where the optimizer has neither
  // max_norm nor skip_nonfinite, which compute it.
  std::optional<double> grad_norm() const;
  // Copies of what the optimizer has made of the keys. ValueError without an
  // optimizer.
  std::vector<KeyState> optimizer_states(const Keys& keys) const;
  // The other way. ValueError where a state is not one of this optimizer and
  // the key's shape; then nothing has changed.
  void set_optimizer_states(
      const Keys& keys,
      const std::vector<KeyState>& states);

  // Waits for all workers; on one machine there is nothing to wait for.
  void barrier() const;

  // Calls `visit` with the opaque updater, if this store is its only owner, for
  // a garbage collector that looks for cycles. `visit` runs under a lock and
  // must not call the store. Never throws by itself; does nothing in a forked
  // child.
  void visit_sole_updater(
      c10::function_ref<void(const OpaqueUpdater&)> visit) const;

  // "KVStore(type='local', keys=3, bytes=72)"; also after close().
  std::string repr() const;

  // A snapshot that shares nothing with the store, and the store it describes.
  // Each key is as it was at one moment, different keys perhaps at different
  // ones. Throws where the updater cannot be copied (a Python callable).
  // Without keys: only what is said of all of them.
  StoreState state(bool with_keys = true) const;
  static c10::intrusive_ptr<KVStore> from_state(StoreState state);

  // Replaces keys, values and updater by those of another store of the same
  // type, all at once, and leaves that one closed. TypeError where this store
  // has keys of the other kind; then neither has changed. Calls of this store
  // under way finish on what they began with.
  // REQUIRES: nobody else uses `other`.
  void take(KVStore& other);

  // Frees values and updater once calls under way have ended. May be repeated;
  // does nothing in a forked child.
  void close();

 private:
  bool is_forked() const;
  void check_usable(const char* op) const;
  Updater updater() const;
  // Frees the state of optimizers before `identity`.
  void replace_updater(const char* op, Updater next, uint64_t identity);
  // The calls, in `scope` after all checks if there is one.
  void push_in(AsyncScope* scope, const Keys& keys, const Tensors& values);
  void pull_in(AsyncScope* scope, const Keys& keys, const Tensors& outs) const;
  void pushpull_in(
      AsyncScope* scope,
      const Keys& keys,
      const Tensors& values,
      const Tensors& outs);
  void broadcast_in(
      AsyncScope* scope,
      const Keys& keys,
      const Tensors& values,
      const Tensors& outs);
  Entries make_entries(const char* op, const Keys& keys, const Tensors& values)
      const;
  void insert(const char* op, const Entries& entries, const Tensors& values);
  void reduce_update(
      const Entries& entries,
      const Tensors& values,
      const Updater& updater);
  void step(
      const Entries& entries,
      const Tensors& values,
      const Optimizer& optimizer);
  void update_one_by_one(
      const Entries& entries,
      const Tensors& values,
      OpaqueUpdater& opaque);
  OptimizerPtr optimizer(const char* op) const;
  void check_expected_keys(const char* op);
  KeyState state_of(Entry& entry, const Optimizer& optimizer) const;
  at::Tensor empty_like(Entry& entry) const;
  void copy_out(
      const Entries& entries,
      const Tensors& outs,
      const Updater& updater) const;

  // Constant after construction.
  const StoreType type_;
  const std::unique_ptr<Comm> comm_;
  const uint64_t num_forks_; // before it was made

  mutable CommStreams comm_streams_; // has its own synchronization

  KeyTable table_; // has its own synchronization

  // Guards updater_, not what it points to, and keeps its kind of keys that of
  // the table. Taken before the table's lock.
  mutable std::mutex updater_mutex_;
  Updater updater_;
  std::vector<Key> expected_keys_; // guarded by updater_mutex_
  std::atomic<bool> expects_keys_{false}; // whether there are any

  static constexpr double kNoNorm = -1;
  std::atomic<int64_t> num_skipped_{0};
  std::atomic<double> grad_norm_{kNoNorm};
};

} // namespace torchkv

#pragma once

#include "core/export.h" // first: it checks the version of torch

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/macros/Macros.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/row_init.h"
#include "device/runtime.h"
#include "device/work.h"
#include "memory/key_state.h"
#include "memory/key_stats.h"
#include "store/arguments.h"
#include "store/compression.h"
#include "store/options.h"
#include "store/state.h"
#include "update/updater.h"

namespace torchkv {

class Store;
struct Meta;
struct StoreStatus;

// A key-value store of tensors. Python, TorchScript and C++ hold the same
// object; this class is the C++ API and what both bindings call. The store
// behind it depends on the type.
//
// Thread safety: any thread may call any method at any time. A push is atomic
// per key. REQUIRES for all methods: the calling thread does not hold the GIL.
//
// A stored value never aliases a tensor of the caller; pushed tensors are only
// read, and not after the call or, if it is asynchronous, its work. A call that
// is refused has changed nothing; only an updater that throws leaves the keys
// before its own updated.
//
// Errors of every method besides its own: RuntimeError after close(), in a
// forked child of the process that made the store, and from inside an updater
// that this store is running; type(), close(), repr(), key_kind(), rank() and
// num_workers() also work after close(). All messages name the operation and,
// if one is involved, the key.
//
// Tensors on accelerators: work is enqueued on the calling thread's current
// streams and the host is not blocked, except for copies to and from CPU
// memory. With CallOptions::async_op, a call checks its arguments and throws as
// otherwise, but enqueues on streams of the store's own, after what the caller
// has enqueued; the Work that it returns, null without async_op, says what the
// caller may do until it has waited. Calls of either kind on one key take
// effect in order.
class TORCHKV_API KVStore : public torch::CustomClassHolder {
 public:
  // As canonical_type (store/registry.h). The runtime outlives the store.
  explicit KVStore(
      const std::string& type = "local",
      Runtime& runtime = default_runtime());
  // With options for stores on several machines (store/options.h).
  KVStore(
      const std::string& type,
      const StoreOptions& options,
      Runtime& runtime = default_runtime());
  ~KVStore() override;
  C10_DISABLE_COPY_AND_ASSIGN(KVStore);

  // "local", "device" or "nccl". Never throws.
  const std::string& type() const {
    return type_;
  }

  // Makes each key's value a copy of its one tensor. ValueError for a key that
  // exists or is repeated, TypeError where the kinds of keys differ.
  //
  // With `share`, on one machine, the value is the tensor itself: updates write
  // it in place, and what the caller writes to it between calls is the stored
  // value. It stays on its device and is not sharded. ValueError for one that
  // is not dense or not where the store has its values, and for memory of
  // another shared value. Until the key is deleted, ValueError for calls in
  // which a tensor overlaps with it, unless it is that tensor, under its key.
  // Saved and copied stores share nothing.
  void init(
      const Keys& keys,
      const Tensors& values,
      const CallOptions& options = {});

  // Adds up each key's tensors, left to right, and hands the sum to the
  // updater, once per distinct key, in the order in which the keys first
  // appear.
  //
  // Values may be torch.sparse_coo tensors with one sparse dimension. Their
  // rows are added up by id: ASSIGN sets the others to zero, elementwise
  // optimizers step the pushed rows only, and other updaters get a dense sum.
  // IndexError for an id that is not a row of the value. The host waits for ids
  // on an accelerator.
  //
  // A row-sparse key gets the rows that it lacks; of a dense tensor, all.
  // ASSIGN forgets the others. NotImplementedError for optimizers and updaters
  // that need the whole value.
  WorkPtr push(
      const Keys& keys,
      const Tensors& values,
      const CallOptions& options = {});

  // Makes a row-sparse key, of at most `num_rows` rows of a shape and dtype: it
  // keeps those that were pushed, in CPU memory, and the others have their
  // initial value and take none. Without `num_rows` there may be as many as
  // 2^63 - 1 elements allow, which is then the first dimension of shape().
  // ValueError for negative sizes, more elements, and a dtype that the initial
  // value cannot have; otherwise as init, which makes such a key of a
  // torch.sparse_coo tensor. On several machines all ranks make the call, rank
  // 0's initial value counts, and each server has the rows of some ids.
  void init_rows(
      const Key& key,
      const std::vector<int64_t>& row_shape,
      c10::ScalarType dtype = c10::kFloat,
      std::optional<int64_t> num_rows = std::nullopt,
      const RowInit& init = {});

  // Writes each key's value into all its tensors, in place.
  // Where outs of several keys share memory, the last key counts.
  WorkPtr pull(
      const Keys& keys,
      const Tensors& outs,
      const CallOptions& options = {}) const;
  // A new tensor for each key, with the stored dtype, strides and device.
  // Never asynchronous.
  std::vector<at::Tensor> pull(
      const Keys& keys,
      const CallOptions& options = {}) const;

  // Writes rows of each key's value, by their numbers, into its tensors, or
  // into new ones; see pull_rows (store/row_pull.h). Never asynchronous.
  void row_sparse_pull(
      const Keys& keys,
      const Tensors& row_ids,
      const Tensors& outs) const;
  std::vector<at::Tensor> row_sparse_pull(
      const Keys& keys,
      const Tensors& row_ids) const;

  // push, then pull. Everything is checked before anything is pushed. If a call
  // in a store of several processes fails later, or times out, some of the new
  // values may have been written.
  WorkPtr pushpull(
      const Keys& keys,
      const Tensors& values,
      const Tensors& outs,
      const CallOptions& options = {});

  // init, then pull. Everything is checked before anything is stored.
  WorkPtr broadcast(
      const Keys& keys,
      const Tensors& values,
      const Tensors& outs,
      const CallOptions& options = {});

  // Replaces the values of distinct keys by copies of their one tensor each,
  // without the updater. What an optimizer keeps for them stays, except its
  // fp32 copies of half-precision values; these stay, too, where they round to
  // the new value of the stored dtype, as they are the same value with more
  // bits. All keys or, on an error, none. ValueError for shapes that differ and
  // repeated keys, TypeError for dtypes that do not convert.
  //
  // With `share` as init: the tensors, of the stored dtype, become the values.
  void assign(
      const Keys& keys,
      const Tensors& values,
      const CallOptions& options = {});

  // Removes the keys; they may be initialized again, with other shapes.
  void erase(const Keys& keys);
  // Forgets rows of row-sparse keys, with what an optimizer keeps for them:
  // they have their initial value again. A tensor of ids for each key; those of
  // rows that a key does not have are skipped. In dist_sync, all ranks make the
  // call in place of a push, and what any of them names is forgotten.
  // ValueError for a dense key; ids as row_sparse_pull, and nothing has
  // changed.
  void erase_rows(const Keys& keys, const Tensors& row_ids);

  bool contains(const Key& key) const;
  int64_t size() const;
  // In order of init.
  std::vector<Key> keys() const;
  // None before the first init.
  std::optional<KeyKind> key_kind() const;
  std::vector<int64_t> shape(const Key& key) const;
  bool is_row_sparse(const Key& key) const;
  // How many rows the value has; of a row-sparse key, those that it keeps.
  // ValueError for a value without dimensions.
  int64_t num_rows(const Key& key) const;
  // Where row_sparse_pull reads row ids, and push adds sparse values up,
  // without a copy to another device, at present: the device of a dense value
  // that is in one piece; else the CPU. KeyError for an unknown key.
  c10::Device row_device(const Key& key) const;
  // The number of updates of the key's value, on several machines as far as
  // this process knows.
  int64_t version(const Key& key) const;
  // What this process's calls have done with keys: how often, how many bytes,
  // how long. On several machines without times: servers sum and update.
  std::vector<KeyStats> stats(const Keys& keys) const;
  c10::ScalarType dtype(const Key& key) const;

  // Changes no value. A null pointer restores ASSIGN. TypeError where it cannot
  // take the store's kind of keys. A push in flight keeps using the old
  // updater. An updater must not call this store (RuntimeError), nor wait for
  // another thread that does: that thread waits for the entry's mutex until the
  // updater returns.
  void set_updater(std::shared_ptr<OpaqueUpdater> updater);

  // Makes a built-in optimizer the updater: pushed values are gradients, whose
  // sum steps the stored value, in the pass that adds them up. Changes no
  // value. With `keep_state` it is the optimizer that is already set, with
  // other hyperparameters; else all keys start without state. ValueError for
  // invalid hyperparameters. From then on TypeError by push for a key whose
  // dtype is neither floating-point nor complex. Returns the optimizer's
  // generation. A push in flight keeps using the old optimizer, except for keys
  // already updated by the new one. Stale state is freed immediately, or at the
  // key's next push if the key is locked. With `check_keys`, keys with options
  // of their own must be keys of the store: UnknownKeyError or, in a store
  // without keys, as expect_keys. Keys that the optimizer being replaced by
  // `keep_state` had are not checked.
  uint64_t set_optimizer(
      Optimizer optimizer,
      bool keep_state = false,
      bool check_keys = true);
  // The same by name; see make_optimizer. If the store has an optimizer of this
  // name, only its hyperparameters change: each key's state and options stay,
  // and so do the groups after the first. So a schedule calls this at each
  // step.
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
  // Calls without a step, because a gradient was not finite. On several
  // machines rank 0 knows; the others have 0, and no grad_norm.
  int64_t num_skipped() const;
  // The 2-norm of the gradients of the last push that made a step, all its keys
  // together, before max_norm limited it. None unless the optimizer has
  // max_norm or skip_nonfinite, which compute it.
  std::optional<double> grad_norm() const;
  // The most steps that the optimizer has made of a key; on several machines,
  // of the keys that this process's server holds.
  int64_t num_steps() const;
  // Copies of what the optimizer keeps for the keys. ValueError without an
  // optimizer. Of a row-sparse key: of its rows in ascending order, with their
  // ids as "row_ids".
  std::vector<KeyState> optimizer_states(const Keys& keys) const;
  // Replaces it. ValueError for a state that does not fit this optimizer and
  // the key's shape, or is of other rows than the key has; then nothing has
  // changed.
  void set_optimizer_states(
      const Keys& keys,
      const std::vector<KeyState>& states);

  // Compresses pushed values from now on, each value of a key's list by itself:
  // what the codec sends of it, and of the residual that earlier pushes at its
  // position have left, is added up. What init stores and pull returns is not
  // compressed, nor is a key's list with a row-sparse value. On several
  // machines, this process's sum is compressed, and sent so. Residuals stay
  // from one codec with error feedback to another, and are freed by others. A
  // push in flight keeps using the old compression. ValueError in a store of
  // type local, unless it is none, and for invalid parts; UnknownKeyError for a
  // key of a group that is not in the store or, in a store without keys, as
  // expect_keys. From then on, by push, TypeError for a key whose dtype is not
  // floating-point, NotImplementedError in a capture into a CUDA graph. On
  // several machines, NotImplementedError if the optimizer skips nonfinite
  // gradients; set_optimizer throws it, too.
  void set_gradient_compression(const Compression& compression);
  // The same for all keys, by name; see make_codec.
  void set_gradient_compression(
      const std::string& type,
      const NumbersByName& numbers = {});
  // Without groups if values are pushed as they are.
  Compression gradient_compression() const;

  // Of the processes that share the store, this one's number from 0, and how
  // many they are; 0 and 1 on one machine. Never throw.
  int64_t rank() const;
  int64_t num_workers() const;
  // How many of the other processes this one takes for lost: 0 on one machine.
  // Does not wait, and answers after a call has failed because of one, too.
  int64_t num_dead_node() const;
  // Waits until this process's pushes have been applied: on one machine, they
  // have been.
  void flush() const;
  // Waits for all workers; on one machine it returns at once.
  void barrier() const;

  // "KVStore(type='local', keys=3, bytes=72)"
  std::string repr() const;

  // A snapshot that shares nothing with the store, and the store it describes.
  // Each key is as it was at one moment, different keys perhaps at different
  // ones. Throws where the updater cannot be copied (a Python callable).
  // Without keys: only what concerns all of them; of a store on several
  // machines, which is refused with keys, what this rank knows. Without the
  // updater: an optimizer is a part of the state all the same.
  StoreState state(bool with_keys = true, bool with_updater = true) const;
  // The same of a store on several machines, on rank 0; the other ranks make
  // the call, too, and get a state without keys.
  StoreState gather_state(bool with_updater = true);
  // See Store.
  OwnState own_state();
  bool holds(const Key& key) const;
  void begin_gather(const std::string& op);
  std::vector<at::Tensor> gather(
      const std::string& op,
      int64_t stage,
      const at::Tensor& bytes,
      bool to_all);
  void fail_gather(const std::string& text);
  // Fills a store without keys. On several machines all ranks make the call,
  // and rank 0's state counts.
  void load(StoreState state);
  // See Store.
  void restore_compression(const StoreState& state);
  static c10::intrusive_ptr<KVStore> from_state(StoreState state);

  // Replaces keys, values and updater by those of another store of the same
  // type, all at once, and leaves that one closed. TypeError where this store
  // has keys of the other kind; then neither has changed. Calls of this store
  // in flight finish on what they began with. REQUIRES: nobody else uses
  // `other`. With `keeps_updater`, the updater or optimizer stays this store's.
  void take(KVStore& other, bool keeps_updater = false);

  // Frees values and updater once calls in flight have ended. May be repeated;
  // does nothing in a forked child.
  void close();

  // The store behind this one (store/store.h), for bindings and servers. Null
  // in a forked child, where it must not be used.
  Store* store() const;

 private:
  bool is_forked() const;
  // The store, for a call of `op`; RuntimeError as above.
  Store& usable(const char* op) const;
  // The same for a call that needs the store's status, or a key's Meta.
  StoreStatus status(const char* op) const;
  Updater updater(const char* op) const;
  Meta meta(const char* op, const Key& key) const;

  const std::string type_;
  const uint64_t num_forks_; // before it was made
  const std::unique_ptr<Store> store_;
};

} // namespace torchkv

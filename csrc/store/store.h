#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../core/errors.h"
#include "../core/export.h"
#include "../core/key.h"
#include "../core/row_init.h"
#include "../device/work.h"
#include "../memory/key_state.h"
#include "../memory/key_stats.h"
#include "../memory/meta.h"
#include "../update/updater.h"
#include "arguments.h"
#include "compression.h"
#include "row_pull.h"
#include "state.h"

namespace torchkv {

// What a store knows of itself, at one moment.
struct StoreStatus {
  bool is_open = true;
  int64_t num_keys = 0;
  int64_t num_bytes = 0; // of the values
  std::optional<KeyKind> key_kind;
  std::vector<Key> expected_keys;
  int64_t num_skipped = 0;
  std::optional<double> grad_norm;
};

// The store behind a KVStore, which documents the operations. It differs by
// type (registry.h). KVStore has checked that calls come from the process
// that made it and not from the store's own updater (InProgress<Store>, which a
// store enters while it runs one).
//
// Thread safety: any thread. REQUIRES for all methods: the calling thread does
// not hold the GIL. All but those that say otherwise throw RuntimeError after
// close().
class TORCHKV_API Store {
 public:
  virtual ~Store() = default;

  // Works are null unless the options ask for an asynchronous call.

  // init or, with outs, broadcast.
  virtual WorkPtr insert(const Call& call) = 0;
  // push or, with outs, pushpull.
  virtual WorkPtr merge(const Call& call) = 0;
  virtual WorkPtr pull(const Call& call) = 0;
  virtual std::vector<at::Tensor> pull(
      const Keys& keys,
      const CallOptions& options) = 0;
  // Copies rows of values. Throws before it writes any of them.
  virtual void pull_rows(const char* op, c10::ArrayRef<RowPull> pulls);
  // Where pull_rows reads row ids and merge adds rows to the value, at present:
  // a hint, for those who have both on an accelerator.
  virtual c10::Device row_device(const char* /*op*/, const Key& /*key*/) const {
    return c10::kCPU;
  }
  // How many rows a value has; of a row-sparse key, those that it keeps.
  virtual int64_t num_rows(const char* op, const Key& key) const;
  // Makes a row-sparse key without rows; and forgets rows of such keys, one
  // list of ids in CPU memory for each, which are rows that it may have.
  // NotImplementedError unless overridden.
  virtual void init_rows(
      const Key& key,
      const Meta& /*meta*/,
      const RowInit& /*init*/) {
    const Where where{"init_rows", key};
    TORCHKV_CHECK_NOT_IMPLEMENTED(
        false,
        where,
        "expected a store with row-sparse keys, but got one of a type that has "
        "none");
  }
  virtual void erase_rows(
      const char* op,
      const Keys& keys,
      c10::ArrayRef<at::Tensor> /*ids*/) {
    const Where where{op, keys.list[0]};
    TORCHKV_CHECK_NOT_IMPLEMENTED(
        false,
        where,
        "expected a store with row-sparse keys, but got one of a type that has "
        "none");
  }
  virtual void assign(const Call& call) = 0;
  virtual void erase(const Keys& keys) = 0;

  // The number of updates of a key's value, as far as this process knows.
  virtual int64_t version(const Key& key) = 0;
  // What this process's calls have done with keys. NotImplementedError unless
  // overridden.
  virtual std::vector<KeyStats> stats(const Keys& /*keys*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "stats: expected a store that counts its calls, but got another");
  }
  // The most steps that the set optimizer has made of a key: of those that this
  // process holds, which may be none. 0 unless overridden.
  virtual int64_t num_steps() {
    return 0;
  }
  virtual std::vector<Key> keys() const = 0;
  // What the operation `op` asks of a key. Nothing for an unknown one.
  virtual std::optional<Meta> meta(const char* op, const Key& key) const = 0;
  // Both also after close().
  virtual StoreStatus status() const = 0;
  virtual Updater updater() const = 0;

  virtual void set_updater(std::shared_ptr<OpaqueUpdater> updater) = 0;
  virtual uint64_t set_optimizer(
      Optimizer optimizer,
      bool keep_state,
      bool check_keys) = 0;
  virtual void expect_keys(const Keys& keys) = 0;
  // NotImplementedError unless overridden.
  virtual void set_compression(const Compression& compression) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        compression.is_none(),
        "set_gradient_compression: expected a store of type 'device' or 'nccl', "
        "but got one of another type, which does not compress");
  }
  // Null: values are pushed as they are.
  virtual CompressionPtr compression() const {
    return nullptr;
  }
  virtual std::vector<KeyState> optimizer_states(const Keys& keys) = 0;
  virtual void set_optimizer_states(
      const Keys& keys,
      const std::vector<KeyState>& states) = 0;

  // See KVStore.
  virtual StoreState state(bool with_keys, bool with_updater) const = 0;
  // The same, of a store on several machines on rank 0; on the other ranks,
  // which all make the call, without keys.
  virtual StoreState gather_state(bool with_updater) {
    return state(/*with_keys=*/true, with_updater);
  }
  // What this process's server holds: of a value that several servers hold, the
  // elements from `begin` on, in tensors of one dimension. All ranks make the
  // call. On one machine, the whole state.
  virtual OwnState own_state() {
    OwnState own{state(/*with_keys=*/true, /*with_updater=*/true), {}, {}};
    own.begins.assign(own.state.values.size(), -1);
    return own;
  }
  // Whether this process's server has the value of a key, or a part of it.
  virtual bool holds(const Key& /*key*/) const {
    return true;
  }
  // Waits until the pushes of all ranks, which make the call, are applied. `op`
  // is the caller's, for errors.
  virtual void begin_gather(const char* /*op*/) {}
  // The bytes that each rank gives to the call, on all ranks or on rank 0. All
  // ranks make it, after begin_gather() or own_state() and with stages that
  // increase from 0; RemoteError if one has called fail_gather() since.
  virtual std::vector<at::Tensor> gather(
      const char* /*op*/,
      int64_t /*stage*/,
      const at::Tensor& bytes,
      bool /*to_all*/) {
    return {bytes};
  }
  virtual void fail_gather(const std::string& /*text*/) {}
  // Fills a new store. On several machines all ranks make the call, and rank
  // 0's state counts.
  virtual void load(StoreState state) = 0;
  // Of a store on several machines: takes the compression of a state with this
  // store's keys and, of its residuals, which are one for each rank, this
  // rank's.
  virtual void restore_compression(const StoreState& /*state*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "load: expected a store on several machines, but got another");
  }
  // REQUIRES: a store of the same type, which nobody else uses.
  virtual void take(Store& other, bool keeps_updater) = 0;

  // Calls `visit` with the opaque updater, if this store is its only owner, for
  // a garbage collector that looks for cycles. `visit` runs under a lock and
  // must not call the store. Never throws by itself; also after close().
  virtual void visit_sole_updater(
      c10::function_ref<void(const OpaqueUpdater&)> visit) const = 0;

  // Waits until this process's pushes have been applied; their errors are those
  // of later calls. On one machine they are applied when push returns.
  virtual void flush() {}

  // Of the processes that share the store, this one's number from 0, and how
  // many they are. Also after close().
  virtual int64_t rank() const {
    return 0;
  }
  virtual int64_t num_workers() const {
    return 1;
  }
  // How many of the others this process takes for lost. Does not wait.
  virtual int64_t num_dead_node() const {
    return 0;
  }
  virtual void barrier() = 0;

  // May be repeated.
  virtual void close() = 0;
};

} // namespace torchkv

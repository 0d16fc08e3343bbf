#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

#include "../core/export.h"
#include "../store/local_store.h"
#include "buffers.h"
#include "caller_values.h"
#include "protocol/action.h"
#include "snapshot_files.h"
#include "updates.h"

namespace torchkv::dist {

// Applies the rounds of one server to the values that it holds, on a thread of
// its own: the core's thread never waits for an updater, but applies a few
// short rounds itself. Thread-safe.
class TORCHKV_API Applier {
 public:
  struct Finished {
    RoundPtr round;
    std::optional<std::string> error; // of the updater
    bool is_measured = false; // not applied
  };
  // Called on the applier's thread, without locks.
  using Done = std::function<void(const std::vector<Finished>&)>;

  // Values are in `buffers`. `owner` is in use (InProgress) while an updater
  // runs. The runtime and the owner outlive this.
  Applier(
      Runtime& runtime,
      const Store* owner,
      int64_t rank,
      const Config& config,
      Buffers buffers,
      Done done);
  // Finishes what is queued. REQUIRES: not in a forked child.
  ~Applier();
  C10_DISABLE_COPY_AND_ASSIGN(Applier);

  void apply(RoundPtr round);
  // Applies rounds on the calling thread, if that takes microseconds and
  // nothing is queued: a hand-over takes longer. Then `done` is not called.
  std::optional<std::vector<Finished>> apply_now(
      const std::vector<RoundPtr>& rounds);
  // Sets Round::partial. The value may not change before apply().
  void measure(RoundPtr round);
  // Fills in the states of a snapshot's values, then calls `done`, after what
  // is queued: with an error if a state could not be copied.
  using Completed =
      std::function<void(Shard, const std::optional<std::string>&)>;
  void complete(Shard shard, Completed done);
  // The same of what `make` returns then, on the applier's thread: no update is
  // under way meanwhile.
  void complete(std::function<Shard()> make, Completed done);
  // Frees the value of a deleted slice.
  void erase(const SliceId& slice, int64_t kid);

  // Makes `state` that of a key for `optimizer`, whose epoch it is, after what
  // is queued; of a key without updates so far, at its first.
  void restore(
      const Key& key,
      const OptimizerPtr& optimizer,
      int64_t epoch,
      KeyState state);
  // As Updates, after what is queued. script() blocks until then, or throws
  // StoreTimeoutError after `timeout` seconds.
  std::shared_ptr<OpaqueUpdater> script(
      const char* op,
      int64_t epoch,
      double timeout);
  void set_script(int64_t epoch, std::shared_ptr<OpaqueUpdater> script);
  void forget_python(int64_t before);
  // Waits until what is queued has been done, for at most `timeout` seconds.
  // Throws what a signal handler raises.
  void drain(double timeout);
  bool is_idle();
  // The most steps of a key that is held.
  int64_t num_steps() {
    return store_.num_steps();
  }
  // Pushed values may be callers' memory.
  const CallerValues& callers() const {
    return callers_;
  }
  // Of a row-sparse key whose value is live (StoredValue): how many rows it
  // has; the ids of some, in the order in which they are stored; rows of it,
  // those of ids that it does not have, too, into a contiguous tensor in CPU
  // memory.
  int64_t num_rows(const Key& key) const {
    return store_.num_rows("num_rows", key);
  }
  at::Tensor row_ids(const Key& key, int64_t begin, int64_t count) const {
    return store_.ids_by_slot(key, begin, count);
  }
  void pull_rows(const RowPull& pull) {
    store_.pull_rows("row_sparse_pull", pull);
  }
  // For Updates::set_python, and for what complete() calls.
  Updates& updates() {
    return updates_;
  }

 private:
  struct Erased {
    SliceId slice;
    int64_t kid;
  };
  struct Measured {
    RoundPtr round;
  };
  struct Held {
    int64_t kid = 0;
    OptimizerPtr optimizer; // if that was the last updater
  };
  using Job = std::variant<RoundPtr, Measured, Erased, std::function<void()>>;
  void enqueue(Job job);
  void loop();
  std::vector<Finished> apply_all(const std::vector<RoundPtr>& rounds);
  void finish(const std::vector<Finished>& finished) const;
  bool is_short(const std::vector<RoundPtr>& rounds) const;
  std::optional<std::string> apply_batch(
      c10::ArrayRef<RoundPtr> rounds,
      const Updates::Update& update);
  void measure_one(const RoundPtr& round);
  // A slice, and the value that its first update, or a snapshot, begins with.
  struct Begun {
    SliceId slice;
    std::shared_ptr<const KeySpec> spec;
    int64_t num_elements;
    int64_t kid;
    ValuePtr source;
  };
  static Begun begun(const Round& round) {
    return {
        round.slice, round.spec, round.num_elements, round.kid, round.source};
  }
  void prepare(const Begun& slice, const Updates::Update& update);
  ValuePtr result_of(const Round& round);
  // applier_lists.cpp: several slices at once.
  struct List;
  List& list_of(const Round& round);
  void prepare_list(
      List& list,
      const Round& round,
      const Updates::Update& update);
  std::optional<std::string> apply_list(
      Round& round,
      const Updates::Update& update);
  void apply_opaque(
      const List& list,
      Round& round,
      const Updates::Update& update);
  // applier_rows.cpp: row-sparse keys.
  void insert_rows(const Begun& slice);
  std::optional<std::string> forget_rows(
      Round& round,
      const Updates::Update& update);
  Blobs stored_rows(const SliceId& slice, int64_t kid);
  void run(const std::function<void()>& function);
  void set_state(const Key& key, const Updater& updater, KeyState state);
  std::optional<KeyState> state_of(const SliceId& slice, int64_t kid);
  void add_states(const Shard& shard);
  void keep_state(const Round& round);
  // Its first pushes as tensors, appended as a group.
  void append_values(
      const Round& round,
      size_t num_pushes,
      Keys& keys,
      Tensors& values) const;
  void forget(const Erased& erased);

  Runtime& runtime_;
  const Store* const owner_;
  const Config config_;
  const Done done_;
  const Buffers buffers_;
  const CallerValues callers_;
  LocalStore store_;

  // Of the thread that has set busy_.
  std::unordered_map<Key, Held, KeyHash> held_; // what store_ has
  Updates updates_;
  std::unordered_map<Key, KeyState, KeyHash> restored_;
  int64_t num_restored_ = 0; // calls of restore()
  std::unordered_map<const void*, std::shared_ptr<List>> lists_; // by parts

  std::mutex mutex_; // guards the rest
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<Job> jobs_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_; // started by the first job
};

} // namespace torchkv::dist

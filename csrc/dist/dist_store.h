#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../store/key_table.h"
#include "../store/options.h"
#include "../store/store.h"
#include "held_parts.h"
#include "list_plan.h"
#include "node.h"
#include "norm_report.h"
#include "receipt.h"
#include "session.h"
#include "snapshot_schedule.h"
#include "staging.h"

namespace torchkv::dist {

class GatherRound;

// ValueError for a key or a value that messages have no room for.
void check_fits_messages(const char* op, const Key& key, int64_t num_dims);

inline bool has_table(const Entries& entries) {
  return std::any_of(entries.begin(), entries.end(), [](const auto& entry) {
    return entry->rows != nullptr;
  });
}

// A store whose keys are spread over the servers of several processes
// (dist_sync, dist_async). It checks calls, sums each process's values, and
// hands them to its session's worker; values and updater are on the servers.
//
// Thread safety and errors as Store. Besides: RemoteError and its subclasses.
class DistStore final : public Store {
 public:
  // Joins the other ranks; see StoreOptions.
  DistStore(
      const std::string& type,
      const Policy& policy,
      Runtime& runtime,
      const StoreOptions& options);
  // Does not block: the node closes the session.
  ~DistStore() override;

  WorkPtr insert(const Call& call) override;
  WorkPtr merge(const Call& call) override;
  WorkPtr pull(const Call& call) override;
  std::vector<at::Tensor> pull(const Keys& keys, const CallOptions& options)
      override;
  void pull_rows(const char* op, c10::ArrayRef<RowPull> pulls) override;
  // Made by all ranks, as insert; rank 0's initial value counts.
  void init_rows(const Key& key, const Meta& meta, const RowInit& init)
      override;
  int64_t num_rows(const char* op, const Key& key) const override;
  // A push of all ranks with dist_sync, of which all rows are forgotten.
  void erase_rows(
      const char* op,
      const Keys& keys,
      c10::ArrayRef<at::Tensor> ids) override;
  void assign(const Call& call) override;
  void erase(const Keys& keys) override;

  std::vector<Key> keys() const override;
  std::optional<Meta> meta(const char* op, const Key& key) const override;
  StoreStatus status() const override;
  Updater updater() const override;

  // Of what this rank sends: each rank has its own.
  void set_compression(const Compression& compression) override;
  CompressionPtr compression() const override;
  void set_updater(std::shared_ptr<OpaqueUpdater> updater) override;
  uint64_t set_optimizer(Optimizer optimizer, bool keep_state, bool check_keys)
      override;
  // Of those of this rank's server.
  int64_t num_steps() override {
    return session_->applier().num_steps();
  }
  void expect_keys(const Keys& keys) override;
  // All ranks make the calls that save and load, and those of the optimizer's
  // states; on all of them.
  std::vector<KeyState> optimizer_states(const Keys& keys) override;
  void set_optimizer_states(
      const Keys& keys,
      const std::vector<KeyState>& states) override;

  // Refused with keys.
  StoreState state(bool with_keys, bool with_updater) const override;
  OwnState own_state() override;
  StoreState gather_state(bool with_updater) override;
  bool holds(const Key& key) const override;
  void begin_gather(const char* op) override;
  std::vector<at::Tensor> gather(
      const char* op,
      int64_t stage,
      const at::Tensor& bytes,
      bool to_all) override;
  void fail_gather(const std::string& text) override;
  void load(StoreState state) override;
  void restore_compression(const StoreState& state) override;
  void take(Store& other, bool keeps_updater) override;
  void visit_sole_updater(
      c10::function_ref<void(const OpaqueUpdater&)> visit) const override;

  int64_t version(const Key& key) override;
  std::vector<KeyStats> stats(const Keys& keys) override {
    return table_.stats("stats", keys);
  }
  int64_t rank() const override;
  int64_t num_workers() const override;
  int64_t num_dead_node() const override;
  void flush() override {
    session_->flush();
  }
  // ValueError, once, if this rank has set updaters otherwise than rank 0.
  void barrier() override;
  void close() override;

 private:
  // The call's entries, and whether its tensors are usual (check_values).
  std::pair<Entries, bool> find(const Call& call) const;
  // Whether one server must have a key. Optimizers step the rows of row-sparse
  // ones by themselves, or refuse to.
  static bool needs_whole(const Updater& updater, bool is_row_sparse);
  void check_updater_fits(const char* op, const Updater& next) const;
  void check_expected_keys(const char* op);
  CompressionPtr compression_of(const Call& call, const Entries& entries) const;
  static void check_skips(const char* op, const GradientSpec& gradient);
  void raise_deferred(const char* op, const Keys* keys) const;
  KeySpec spec_of(const Meta& meta, bool whole) const;
  WorkPtr merge_values(const Call& call);
  // dist_store_lists.cpp: values that travel together.
  struct RestOfCall { // the other ones
    RestOfCall(const ListPlan& plan, const Call& call, const Entries& all);
    Keys keys;
    Tensors values;
    Entries entries;
  };
  // Null if none do.
  ListPlanPtr plan_of(const Call& call, const Entries& entries, bool are_usual);
  void add_lists(const ListPlan& plan, const Call& call, Request& request)
      const;
  WorkPtr finish(
      const Call& call,
      PendingPtr pending,
      Outs outs,
      const CallerValues::OfCall* values = nullptr) const;
  void pull_sparse(const Call& call);
  void pull_dense_rows(const char* op, c10::ArrayRef<RowPull> pulls);

  // dist_store_tables.cpp: row-sparse keys.
  struct Table { // rows in ascending order of their ids
    at::Tensor ids;
    at::Tensor values;
  };
  Request::Item init_item(
      const Entry& entry,
      bool whole,
      const at::Tensor& ids,
      const at::Tensor& values) const;
  std::pair<EntryPtr, Request::Item> make_table(
      const char* op,
      const Key& key,
      const at::Tensor& sparse,
      bool whole) const;
  void insert_entries(const char* op, const Entries& entries, Request request);
  void insert_table(
      const char* op,
      const EntryPtr& entry,
      bool whole,
      const at::Tensor& ids,
      const at::Tensor& values);
  void insert_saved(
      const char* op,
      const Key& key,
      const StoreState& state,
      size_t i,
      bool whole);
  WorkPtr merge_with_tables(const Call& call, const Entries& entries);
  WorkPtr pull_with_tables(const Call& call, const Entries& entries);
  void ask(
      const char* op,
      const Key& key,
      std::vector<Request::Query> queries,
      const at::Tensor& answers,
      int64_t min_version) const;
  std::vector<int64_t> num_rows_of_slices(
      const char* op,
      const Entry& entry,
      int64_t min_version) const;
  std::vector<at::Tensor> ids_of_slices(
      const char* op,
      const Entry& entry,
      int64_t min_version,
      bool only_own = false) const;
  Table pull_table(const char* op, Entry& entry, int64_t min_version) const;
  void pull_table(const char* op, const RowPull& pull) const;
  Table pull_for(
      const char* op,
      Entry& entry,
      c10::ArrayRef<at::Tensor> outs,
      int64_t min_version) const;
  void write_table(
      const char* op,
      Entry& entry,
      const Table& table,
      c10::ArrayRef<at::Tensor> outs,
      int64_t min_version) const;
  void pull_table_rows(
      const char* op,
      const Entry& entry,
      const at::Tensor& ids,
      const at::Tensor& rows,
      int64_t min_version) const;
  at::Tensor checked_row_ids(
      const char* op,
      const Entry& entry,
      const KeyState& state) const;
  void restore_states(
      const char* op,
      const Entries& entries,
      const std::vector<KeyState>& states,
      const std::vector<at::Tensor>& row_ids);
  // Waits for a call and throws its error.
  const Return& wait(const char* op, Pending& pending) const;
  std::unique_lock<std::timed_mutex> hold(
      const char* op,
      std::timed_mutex& mutex) const;
  // Waits for the other ranks' stores; returns what is left of the time-out.
  double join(const char* op) const;
  PendingPtr begin(
      const char* op,
      Request request,
      bool is_watched = false,
      Session::Complete complete = nullptr) const;
  std::vector<PendingPtr> begin_all(
      const char* op,
      std::vector<Request> requests) const;
  void run(const char* op, Request request) const;
  std::optional<Shard> latest_snapshot(
      const SnapshotFiles& files,
      const Config& config) const;
  void take_snapshot(std::optional<int64_t> step);
  void set_spec(const char* op, Updater next, bool keep_state);
  void send_spec(const char* op, const UpdateSpec& spec);
  void wait_for_spec();
  void settle_own(const char* op);
  void forget_updaters();
  void meet(const char* op);
  void check_gradient(const char* op, const GradientSpec& gradient) const;
  void check_same_updates(const char* op, const UpdateSpec& own);
  int64_t epoch() const;
  std::vector<Place> places_of(const Entry& entry) const;
  std::vector<Place> places_elsewhere(const Entry& entry) const;
  void settle(const char* op);
  std::unique_ptr<DistStore> make_exchange(int64_t number) const;
  void begin_rounds(const char* op);
  // Of a call that gathers, in this order; not all of them.
  static constexpr int64_t kBegin = 0;
  static constexpr int64_t kScripts = 1;
  static constexpr int64_t kParts = 2;
  static constexpr int64_t kChecked = 3;
  static constexpr int64_t kFirstOfCallers = 4;
  std::string gather_prefix() const;
  std::unique_ptr<GatherRound> begin_round(
      const char* op,
      int64_t stage,
      int64_t num_bytes);
  std::vector<at::Tensor> exchanged(
      const char* op,
      int64_t stage,
      const at::Tensor& bytes,
      bool to_all);
  void check_together(const char* op, c10::function_ref<void()> check);
  void check_all_present(const char* op) const;
  void check_none_failed(const char* op) const;
  void tell_others(const std::exception_ptr& error);
  template <class Function>
  auto guarded(Function function) {
    try {
      return function();
    } catch (...) {
      tell_others(std::current_exception());
      throw;
    }
  }
  StoreState begin_state(bool with_updater);
  Keys all_keys() const;
  UnsentByKey unsent(const Keys& keys) const;
  void add_unsent(OwnState& own, const Keys& keys) const;
  std::vector<at::Tensor> gather_scripts();
  std::shared_ptr<OpaqueUpdater> own_script(
      const char* op,
      const at::Tensor& bytes) const;
  void check_loads(const char* op, const StoreState& state) const;
  void load_updater(const char* op, StoreState& state);

  Runtime& runtime_;
  const uint64_t num_forks_; // before it was made
  const double timeout_;
  const bool is_sync_;
  std::shared_ptr<Node> node_;
  std::shared_ptr<Session> session_;
  KeyTable table_; // entries without slices; row-sparse ones have no rows
  std::atomic<bool> has_tables_{false}; // whether there were row-sparse keys
  Staging staging_;
  ListPlans plans_;
  SnapshotSchedule snapshots_;
  const std::shared_ptr<NormReport> norms_; // pushes in flight have it, too
  const std::string name_;
  bool began_from_snapshot_ = false;

  // These are held while the call waits for other ranks.
  std::timed_mutex barrier_mutex_; // a rank is in one barrier at a time
  std::timed_mutex gather_mutex_; // of calls that use the exchange store
  std::unique_ptr<DistStore> exchange_; // null: none, or the last call failed
  std::atomic<int64_t> last_round_{0}; // of the gatherings

  // Held by calls that change the updater, over the messages to the servers,
  // and by those that change the compression.
  std::timed_mutex setting_mutex_;
  mutable std::mutex updater_mutex_; // guards the rest
  Updater updater_;
  UpdateSpec spec_; // without an archive on ranks other than 0
  PendingPtr sent_spec_; // rank 0's latest
  // Those over several servers; whether they are row-sparse.
  std::unordered_map<Key, bool, KeyHash> split_keys_;
  std::unordered_set<Key, KeyHash> whole_keys_; // initialized as KeySpec::whole
  CompressionPtr compression_; // null: none
  std::vector<Key> expected_keys_; // of the updater
  std::vector<Key> compression_keys_; // the same of the compression
  int64_t settled_epoch_ = 0; // of the updater at the last barrier
};

} // namespace torchkv::dist

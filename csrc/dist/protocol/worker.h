#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core.h"
#include "insertion_map.h"
#include "request.h"
#include "worker_state.h"

namespace torchkv::dist {

// One worker of a store: it sends a rank's calls to the servers until they are
// answered. docs/protocol.md documents the rules.
class TORCHKV_API Worker final : public Core {
 public:
  // `inc` counts the processes that have had this rank in this job. `allocate`
  // is needed with Config::push_regions.
  Worker(
      int32_t rank,
      int64_t inc,
      const Config& config,
      Time now,
      AllocateRegion allocate = nullptr);
  ~Worker();

  // Whether calls may begin: all servers have been heard of, or lost.
  bool ready() const;
  // Begins a call, which ends by the action Return, at the latest `timeout`
  // seconds from now. Several calls may begin before take(): their messages
  // share frames. REQUIRES: ready() and no stalled().
  CallId call(Request request, Time now, Time timeout);
  // Ends a call that has not sent anything yet, as if it had timed out.
  void withdraw(CallId id, Time now);
  // A call that waits for memory, behind which no call may begin, or 0.
  CallId stalled() const {
    return stalled_;
  }

  // Events, as those of Server. A frame that no right server sends is harmless.
  void on_message(const Frame& frame, Time now);
  void on_timer(Time now);
  void on_peer_lost(int32_t server, Time now);
  // The manifest, or an error's text.
  void on_written(
      int64_t snapshot,
      const std::optional<std::string>& error,
      Time now);
  // `bytes` is a copy of the lease, `kid` and `version` the stamp of its region
  // after the copy.
  void on_copied(
      int64_t opno,
      const Blob& bytes,
      int64_t kid,
      int64_t version,
      Time now);

  // The latest version of a slice that this worker has seen; none: unknown.
  std::optional<int64_t> version(const SliceId& slice) const;
  // Operations without an answer, also those of calls that have ended.
  size_t num_operations() const {
    return operations_.size();
  }
  // What all calls end with from now on.
  const std::optional<Error>& fatal() const {
    return fatal_;
  }
  // Of the hyperparameters: rank 0's latest, or what all servers have.
  int64_t generation() const {
    return rank_ == 0 ? gen_ : committed_;
  }
  int64_t snapshot() const {
    return snap_;
  }
  // REQUIRES: a server's number.
  LinkState link_state(int32_t server) const {
    return link_of(server).state;
  }

 private:
  friend struct WorkerAccess; // for tests

  using Operations = std::map<int64_t, WorkerOperation>; // by opno
  using Calls = std::map<CallId, WorkerCall>;
  using Pieces = std::vector<std::pair<int64_t, int32_t>>; // (opno, index)

  void flush() override;

  // Messages.
  void receive(const Message& message);
  void receive_value(const Message& message, WorkerOperation* operation);
  bool fits(const WorkerOperation& operation, const Message& value) const;
  void greet(const Message& welcome, WorkerLink& link);
  void complete_config();
  WorkerOperation* find_operation(int64_t opno, int32_t server);
  WorkerOperation* find_answered(const Message& answer);
  void note_got(int32_t server, int64_t opno, int32_t index);

  // Calls.
  bool has_room(const Request& request) const;
  std::optional<Error> refusal(const Request& request) const;
  std::optional<Group> group_of(const Request& request) const;
  Counts counts(std::optional<int32_t> server) const;
  void begin_stalled();
  // These may end the call: then `call` is no more.
  void begin(CallId id, WorkerCall& call);
  void begin_items(CallId id, WorkerCall& call);
  bool has_calls(const Request& request) const;
  void begin_deletes();
  static WorkerTablePtr table_for(
      const std::vector<WorkerTablePtr>& before,
      const Request::Item& item,
      const Place& at);
  void issue_inits(CallId id, WorkerCall& call);
  void issue_values(CallId id, WorkerCall& call);
  void issue_list(CallId id, Request::Kind kind, Request::Item& item);
  void begin_config(CallId id, WorkerCall& call);
  void begin_snapshot(CallId id, WorkerCall& call);
  void meet(CallId id, WorkerCall& call);
  void everywhere(CallId id, WorkerCall& call, const Message& request);
  void complete(CallId id, WorkerCall& call);
  void write_manifest(const WorkerCall& call);
  void close_if_idle();
  void time_out(CallId id);
  bool is_awaited(const WorkerOperation& operation, CallId id) const;
  void end(
      CallId id,
      std::optional<Error> error,
      std::vector<SliceResult> results = {});

  // Lists.
  void take_apart_items(Request& request);
  bool is_joined(const SliceList& list) const;
  WorkerListPtr join(const SliceListPtr& list);
  void take_apart(const WorkerListPtr& list, bool asks = true);
  void take_apart(int64_t opno, const WorkerList& list, bool asks);
  void take_apart_lists(c10::function_ref<bool(const WorkerTable&)> which);
  static std::vector<SliceResult> flat(std::vector<SliceResult> results);

  // Operations.
  int32_t num_pieces(size_t bytes) const;
  size_t piece_size(size_t bytes, int32_t index) const;
  Blob piece_of(const WorkerOperation& operation, int32_t index) const;
  WorkerOperation& issue(
      CallId id,
      const WorkerTablePtr& table,
      Message request,
      std::optional<Blob> payload = std::nullopt,
      std::optional<size_t> answer_bytes = std::nullopt);
  static std::optional<size_t> place_result(
      WorkerCall& call,
      const WorkerOperation& operation);
  void use_region(WorkerOperation& operation);
  void measured(
      const std::shared_ptr<WorkerStep>& step,
      size_t part,
      double partial);
  void transmit(WorkerOperation& operation);
  // `index` -1: only asks.
  void send_operation(
      const WorkerOperation& operation,
      int32_t index,
      int64_t frame);
  void pump(int32_t server);
  void send_to(int32_t server, Message message);
  void beat(int32_t server);
  void free_leases(int32_t server);
  void finish(int64_t opno, WorkerAnswer answer);
  void forget(const Key& key);

  // Failures.
  void lose(int32_t server);
  void fail(const Error& error);

  WorkerLink& link_of(int32_t server) {
    return links_[static_cast<size_t>(server)];
  }
  const WorkerLink& link_of(int32_t server) const {
    return links_[static_cast<size_t>(server)];
  }

  const int32_t rank_;
  const int64_t inc_;
  const bool sync_;
  const AllocateRegion allocate_;
  Time now_; // of the event at hand
  std::vector<WorkerLink> links_; // by server
  std::vector<WorkerTablePtr> control_; // by server
  InsertionMap<Key, WorkerKey, KeyHash> keys_;
  std::vector<WorkerListPtr> lists_;
  Operations operations_;
  Calls calls_;
  int64_t opno_ = 0;
  CallId last_call_ = 0;
  int64_t gen_ = 0;
  int64_t committed_ = 0;
  int64_t snap_ = 0;
  int64_t phase_ = 0;
  std::optional<Error> fatal_;
  CallId closing_ = 0;
  std::set<CallId> deleting_; // calls that wait for others on their keys
  Blob options_; // the latest of the predecessor, with rank 0
  bool completed_ = false; // its last change
  CallId stalled_ = 0;
  std::vector<std::pair<int32_t, Pieces>> got_; // of the frame at hand
  std::vector<RegionPtr> abandoned_; // that a lost server may still read
};

} // namespace torchkv::dist

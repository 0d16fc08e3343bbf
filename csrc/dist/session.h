#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "applier.h"
#include "background.h"
#include "deferred_errors.h"
#include "pending.h"
#include "protocol/server.h"
#include "protocol/worker.h"
#include "table_queries.h"
#include "transport/transport.h"

namespace torchkv::dist {

class Node;

// This process's part of one store: its worker, its server, and what carries
// out their actions. The node's mutex guards all of it but what says otherwise.
class Session {
 public:
  // `owner` as in Applier. `files` may be null: then snapshots fail.
  // `restored`, if not null, is what the server begins with.
  Session(
      std::shared_ptr<Node> node,
      const Config& config,
      int64_t inc,
      int64_t sinc,
      Runtime& runtime,
      const Store* owner,
      std::unique_ptr<SnapshotFiles> files,
      const Shard* restored);
  ~Session();
  C10_DISABLE_COPY_AND_ASSIGN(Session);

  const Config& config() const {
    return config_;
  }
  Applier& applier() {
    return applier_;
  }

  // Waits until all servers have been heard of, as calls require;
  // StoreTimeoutError otherwise. Without the node's mutex.
  void join(const char* op, double timeout);

  // Begins a call. With `is_watched` an error that nobody waits for is kept for
  // deferred_error(). With `complete`, the call begins when that has returned,
  // on a thread of the session's, and so do all calls after it, in order.
  // Without the node's mutex.
  using Complete = std::function<void(Request&)>;
  PendingPtr call(
      Request request,
      double timeout,
      bool is_watched,
      Complete complete = nullptr);
  // Begins calls one after the other, with none of another thread's in between.
  // Without the node's mutex.
  std::vector<PendingPtr> call_all(
      std::vector<Request> requests,
      double timeout);
  // For a delete that is not waited for any longer: it does not begin from now
  // on. Returns whether it had begun. Without the node's mutex.
  bool withdraw(const PendingPtr& pending);
  // An error of an earlier push of one of the keys or, without keys, of any.
  // It is reported once. Without the node's mutex.
  std::optional<Error> deferred_error(const Keys* keys);
  // The same of these keys, which are asked for if there is any.
  std::optional<Error> deferred_error(c10::function_ref<Keys()> keys);

  // Whether calls wait for others' `complete`. Without the node's mutex.
  bool has_queued();

  // On a thread of the session's, for what callers' futures do.
  void run_later(std::function<void()> function) {
    futures_.run(std::move(function));
  }

  // Begins the close call, unless it has begun, once calls may begin. Without
  // the node's mutex.
  void close(double timeout);
  // Whether it has ended. Without the node's mutex.
  bool closed();
  // What every call fails with from now on. Without the node's mutex.
  std::optional<Error> fatal();

  // The other ranks that the worker or the server takes for lost, or that an
  // error has named as lost. Without the node's mutex.
  std::vector<int32_t> lost_ranks();

  // The slices of the keys that this rank's server holds, with the states of
  // their optimizer; StoreTimeoutError if an updater keeps it waiting for
  // `timeout` seconds. REQUIRES: no push is in flight. Without the node's
  // mutex.
  Shard held(const char* op, const Keys& keys, double timeout);
  // The latest version of the slice that this rank knows, or -1. Without the
  // node's mutex.
  int64_t version(const SliceId& slice);
  // The latest options that this rank's server has; empty if none. Without the
  // node's mutex.
  Blob options();
  // Waits for the pushes that are in flight. Without the node's mutex.
  void flush();

  // For the node:
  void on_frame(Direction direction, const Frame& frame);
  void on_timer(Time now);
  void on_peer_lost(int32_t rank);
  bool is_closed() const {
    return closed_;
  }

 private:
  struct Watched {
    PendingPtr pending;
    std::vector<Key> keys;
    bool is_watched;
    bool is_push;
    bool is_close;
  };
  PendingPtr call_locked(
      Request request,
      double timeout,
      bool is_watched,
      Complete complete);
  void begin(Request request, double timeout, Watched watched);
  void run_queued(
      Request request,
      double timeout,
      const Watched& watched,
      Complete complete);
  void end(const Watched& watched, Return result);
  void begin_close();
  template <class Core>
  void written(
      Core& core,
      int64_t number,
      const std::optional<std::string>& error);
  void perform(Actions actions);
  void perform_one(Send& action);
  void perform_one(const Wake& action);
  void perform_one(Measure& action);
  void perform_one(const Erase& action);
  void perform_one(WriteShard& action);
  void perform_one(WriteManifest& action);
  void perform_one(Return& action);
  // What this session's configuration and calls never lead to.
  template <class Other>
  void perform_one(const Other& action);
  void note_applied(const std::vector<Applier::Finished>& finished);
  // On the applier's thread.
  void on_applied(const std::vector<Applier::Finished>& finished);

  const std::shared_ptr<Node> node_;
  const Config config_;
  Server server_;
  Worker worker_;
  std::unordered_map<CallId, Watched> calls_;
  std::vector<PendingPtr> queued_; // calls that have not begun
  DeferredErrors deferred_; // of watched calls
  bool closing_ = false;
  std::optional<double> close_timeout_; // of a close call that has not begun
  bool closed_ = false; // by the close call's end
  const std::unique_ptr<SnapshotFiles> files_;
  // Last: their threads use the rest, and the applier the writer.
  Background writer_;
  Applier applier_;
  TableQueries table_queries_;
  Background queue_;
  Background futures_;
};

} // namespace torchkv::dist

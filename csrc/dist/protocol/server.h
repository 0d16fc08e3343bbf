#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core.h"
#include "insertion_map.h"
#include "server_state.h"

namespace torchkv::dist {

// One server of a store: it holds a slice of the keys, collects the workers'
// pushes into rounds, and answers pulls. docs/protocol.md documents the rules.
class TORCHKV_API Server final : public Core {
 public:
  // `sinc` identifies this process among all that were ever server `sid`.
  Server(
      int32_t sid,
      int64_t sinc,
      const Config& config,
      Time now,
      const Shard* restored = nullptr);
  ~Server();

  // Makes the part of a slice's value that a query asks for; null if the slice
  // does not have it. Events call it, while nothing writes to the value, so it
  // should be fast.
  using Select = std::function<ValuePtr(
      const SliceId& slice,
      const KeySpec& spec,
      const Value& value,
      const Blobs& query)>;
  void set_select(Select select) {
    select_ = std::move(select);
  }

  // Events. A frame may be late, repeated or reordered, and a message that no
  // right worker sends is harmless. Call on_timer at least every 100 ms, and at
  // the times of Wake.
  void on_message(const Frame& frame, Time now);
  void on_timer(Time now);
  // The driver believes that the worker is gone. A wrong belief costs an error,
  // never a wrong value.
  void on_peer_lost(int32_t rank, Time now);
  // The shard, or an error's text: then the snapshot fails.
  void on_written(
      int64_t snapshot,
      const std::optional<std::string>& error,
      Time now);
  void on_measured(const RoundPtr& round, Time now);
  // `error`: what the updater has thrown.
  void on_applied(
      const RoundPtr& round,
      const std::optional<std::string>& error,
      Time now);

  // For tests and simulators.
  struct LeaseView {
    int32_t rank;
    int64_t inc;
    int64_t opno;
    PeerState state; // kLost, too, if the session has been replaced
  };
  struct SliceView {
    SliceId slice;
    std::shared_ptr<const KeySpec> spec;
    int64_t kid;
    int64_t version;
    bool busy;
    ValuePtr value; // while busy: the round's source
    std::vector<std::pair<int32_t, int64_t>> clock; // by rank
    std::vector<LeaseView> leases;
  };
  std::vector<SliceView> slices() const;
  const std::optional<Error>& fatal() const {
    return fatal_;
  }
  // The latest; empty if there are none.
  const Blob& options() const {
    return options_.rbegin()->second;
  }
  PeerState peer_state(int32_t rank) const {
    return peer(rank).state;
  }

 private:
  using Operation = ServerOperation;
  using OperationPtr = ServerOperationPtr;
  using Reply = ServerReply;
  using Stream = ServerStream;
  using Peer = ServerPeer;
  using Slice = ServerSlice;
  using SlicePtr = ServerSlicePtr;

  void flush() override;

  // server_check.cpp: whether a right worker may have sent it.
  bool is_acceptable(const Message& message) const;
  bool is_acceptable_header(const Message& message) const;
  bool is_acceptable_operation(const Message& message) const;
  bool has_acceptable_payload(const Message& message) const;
  bool is_piece(const Message& message) const;
  bool is_acceptable_init(const Message& message) const;
  std::optional<int64_t> num_elements(const SliceId& id, const KeySpec& spec)
      const; // none: the key has no such slice

  // server.cpp: sessions.
  void receive(const Message& message, Time now);
  void handle(Peer& peer, const Message& message, Time now);
  void greet(const Message& hello, Time now);
  void lose(int32_t rank, Time now);
  void leave(int32_t rank, Time now);
  void fail(const Error& error);
  void expire(const Message& message);
  Message make(Kind kind, int32_t rank) const;
  void answer_to(int32_t rank, Message message);
  Peer& peer(int32_t rank) {
    return *peers_[static_cast<size_t>(rank)];
  }
  const Peer& peer(int32_t rank) const {
    return *peers_[static_cast<size_t>(rank)];
  }
  static bool is_member(const Peer& peer) {
    return peer.state == PeerState::kExpected || peer.state == PeerState::kUp;
  }
  bool any_member() const;

  // server_lists.cpp, server_apart.cpp: several slices as one, and apart.
  // The operations on slices that one on a list is.
  class Apart {
   public:
    const std::vector<OperationPtr>& find(const OperationPtr& op);

   private:
    std::map<const Operation*, std::vector<OperationPtr>> ops_;
  };
  void receive_single(Peer& peer, const Message& message, Time now);
  void receive_list(Peer& peer, const Message& message, Time now);
  static Message part_of(const Message& message, size_t i, Message part);
  static RoundPtr part_of(const RoundPtr& round, size_t i);
  SlicePtr join(Peer& from, const Message& message);
  static std::vector<int64_t> lasts(
      const Peer& of,
      const std::vector<SlicePtr>& parts);
  bool is_joint(const Operation& op) const;
  void take_apart(const OperationPtr& op, Time now);
  void take_apart(const SlicePtr& joint);
  void take_apart(Peer& of, const Slice& joint, Apart& apart);
  void take_apart_lists();
  void on_list_applied(
      const RoundPtr& round,
      const std::optional<std::string>& error,
      Time now);

  // server_streams.cpp: each operation once, in program order.
  void receive_operation(Peer& peer, const Message& message, Time now);
  Stream& open_stream(Peer& peer, const SliceId& id);
  void note_got(const Message& message);
  OperationPtr stage(Peer& peer, Stream& stream, const Message& message);
  void hold(Peer& peer, Stream& stream, const OperationPtr& op);
  OperationPtr next_held(Peer& peer, Stream& stream);
  void begin_held(Peer& peer, const SliceId& id, Time now);
  void begin(Peer& peer, Stream& stream, const OperationPtr& op, Time now);
  void perform(const OperationPtr& op, Time now);
  void reject(const OperationPtr& op, ErrorCode code);
  Stream* stream_of(const Operation& op);

  // server_replies.cpp: answers and leases.
  void forget(Peer& peer, Time now);
  void drop_replies(Peer& peer, Stream& stream, int64_t below, Time now);
  void drop_reply(Peer& peer, int64_t opno, Time now);
  void erase_entry(Peer& peer, int64_t opno);
  void end_lease(Peer& peer, int64_t opno, Time now);
  void end_leases(Peer& peer, Time now);
  void reply(const OperationPtr& op, Reply reply);
  void reply_done(const OperationPtr& op);
  void reply_error(const OperationPtr& op, const Error& error);
  void answer(
      int32_t rank,
      int64_t opno,
      const Reply& reply,
      const std::vector<int32_t>& have,
      int64_t priority);
  void send_pieces(Peer& peer);
  void send_all_pieces();
  static const Reply* find_value(const Peer& peer, int64_t opno);

  // server_slices.cpp: members and values of slices.
  static bool is_leaving(const Slice& slice, int32_t rank);
  void do_init(const OperationPtr& op, Time now);
  void do_delete(const OperationPtr& op, Time now);
  void do_push(const OperationPtr& op, Time now);
  void do_pull(const OperationPtr& op, Time now);
  SlicePtr create(
      const SliceId& id,
      std::shared_ptr<const KeySpec> spec,
      ValuePtr value,
      int64_t kid,
      int64_t snap);
  void detach(const SlicePtr& slice, int32_t rank, Time now, bool deleted);
  void free_slice(const SlicePtr& slice, Time now);
  SlicePtr find(const SliceId& id) const;
  std::vector<SlicePtr> all_slices() const;
  void restore(const Shard& shard);

  // server_rounds.cpp: which pushes make an update, what is answered when.
  bool one_is_enough() const { // and nobody waits for more
    return config().policy.quorum == 1 && config().policy.grace == 0;
  }
  using Take =
      c10::SmallVector<int32_t, 8>; // ranks whose first pushes make a round
  void advance(const SlicePtr& slice, Time now);
  Take close_round(Slice& slice, Time now);
  bool is_admitted(const Slice& slice, const Operation& push) const;
  bool is_within(const Slice& slice, int32_t rank, int64_t clock) const;
  int64_t slowest(const Slice& slice) const;
  bool is_idle(int32_t rank) const;
  void begin_round(const SlicePtr& slice, const Take& take, Time now);
  size_t free_slot(const Slice& slice) const;
  std::vector<std::shared_ptr<Shot>> shots_of(
      const SliceId& id,
      const ValuePtr& value) const;
  void answer_pulls(const SlicePtr& slice, Time now);
  bool may_read(const Slice& slice, const Slice::Pull& pull) const;
  ValuePtr select(const Slice& slice, const Value& value, const Blobs& query)
      const;

  // server_apply.cpp: the work on a round.
  void apply(Slice& slice);
  void do_norm(const OperationPtr& op);
  void do_factor(const OperationPtr& op);
  void answer_norms(Slice& slice);

  // server_control.cpp: the server's own operations.
  void do_config(const OperationPtr& op, Time now);
  void do_enter(const OperationPtr& op, Time now);
  void do_meet(const OperationPtr& op);
  void do_close(const OperationPtr& op, Time now);
  void check_barriers();
  std::optional<Reply> leaves_enter(Operation& op);
  bool waits_for(const Operation& op, size_t count) const;
  void check_meeting();
  void check_closed();
  std::vector<int32_t> missing(const Message& message) const;
  void do_snapshot(const OperationPtr& op);
  void reached_snapshots(const SlicePtr& slice);
  void capture(Slice& slice, int64_t number);
  void check_snapshots();

  const int32_t sid_;
  const int64_t sinc_;
  const bool sync_;
  Select select_;
  Time now_; // of the last event
  std::vector<std::unique_ptr<Peer>> peers_; // by rank
  InsertionMap<SliceId, SlicePtr, SliceHash> slices_; // and those of lists
  std::vector<SlicePtr> lists_; // those
  InsertionMap<SliceId, int64_t, SliceHash> births_; // incarnations so far
  InsertionMap<SliceId, std::vector<OperationPtr>, SliceHash> waiting_init_;
  std::map<int64_t, OperationPtr> open_; // begun, not answered; by number
  int64_t num_operations_ = 0; // that have begun
  int64_t num_replies_ = 0;
  std::map<int64_t, Blob> options_; // by generation; never empty
  int64_t committed_ = 0;
  int64_t phase_ = 0; // barriers left, as far as known here
  std::vector<OperationPtr> entering_;
  InsertionMap<int64_t, OperationPtr> snapshots_; // that are under way
  using Shots = InsertionMap<SliceId, std::shared_ptr<Shot>, SliceHash>;
  InsertionMap<int64_t, Shots> captures_;
  int64_t snap_seen_ = 0;
  std::optional<Error> fatal_;
  using Pieces = std::vector<std::pair<int64_t, int32_t>>; // opno, index
  // (rank, inc) -> the pieces that have come since the last take()
  std::vector<std::pair<std::pair<int32_t, int64_t>, Pieces>> got_;
};

} // namespace torchkv::dist

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "../../core/export.h"
#include "action.h"
#include "insertion_map.h"
#include "piece_queue.h"

namespace torchkv::dist {

// Private to Server.

// An operation of a worker, from its first message to its answer.
struct ServerOperation {
  // Without its piece.
  TORCHKV_API explicit ServerOperation(const Message& message);

  // Unique in the server, from when it begins; that of the first of several.
  int64_t number = 0;
  int32_t rank;
  int64_t inc;
  Kind kind;
  SliceId slice;
  SliceListPtr list; // null, or what `slice` is the name of
  int64_t count; // operations that this one is
  int64_t opno;
  int64_t prev;
  std::vector<int64_t> prevs;
  int64_t priority;
  int64_t gen;
  int64_t snap;
  int64_t phase;

  int32_t num_pieces;
  // Those of several that have come. Not a vector: what a peer says about the
  // number of pieces takes no memory before they are here.
  std::map<int32_t, Blob> staged;
  Blobs pieces; // when all are here
  size_t num_bytes = 0; // of them, or of the region
  std::optional<Region> region;

  std::shared_ptr<const KeySpec> spec; // kInit
  int64_t total;
  bool is_encoded;
  int32_t dtype;
  int32_t item_bytes;
  int64_t round;
  int64_t base;
  int64_t min_version;
  Rare<Group> group;
  double factor;
  int64_t retire;
  Blob options; // kConfig
  Counts counts;

  bool held = false; // until the operation before it begins
  bool written = false; // kSnapshot: the shard is on its way to the disk
  size_t num_captured = 0; // kSnapshot: so many of `counts` are in it
  size_t awaited = 0; // kEnter: the one of `counts` that kept it last time
};
using ServerOperationPtr = std::shared_ptr<ServerOperation>;

// An answer, kept until the worker says that it has it.
struct ServerReply {
  Kind kind = Kind::kDone;
  int64_t version = 0;
  int64_t kid = 0;
  int64_t round = 0;
  int64_t age = 0;
  int64_t phase = 0;
  double partial = 0;
  int32_t count = 1; // of the operations that it answers
  std::shared_ptr<const Error> error; // kError
  ValuePtr value; // kValue without a lease
  std::optional<Region> lease; // kValue
};

// The operations of one worker on one slice (or on the server itself), in
// program order.
struct ServerStream {
  SliceId id;
  int64_t order = 0; // of the peer's streams
  int64_t last = 0; // operation that has begun
  // Of a list, whose numbers are those of its first slice: if not empty, that
  // of each slice, of which `last` is the latest.
  std::vector<int64_t> lasts;
  std::vector<int64_t> opnos; // of a list: of the entries that refer to it
  bool ended = false; // that was a delete
  size_t num_entries = 0; // that refer to this stream
  std::map<int64_t, ServerOperationPtr> held; // prev -> too early
  std::vector<int64_t> replied; // in the order of the replies; some dropped
  std::optional<Error> failed; // what all later operations get
};

// Pushes of a slice that are not applied: those of a rank in their order.
class PendingPushes {
 public:
  bool empty() const {
    return pushes_.empty();
  }
  // That have pushes here.
  size_t num_ranks() const {
    return num_ranks_;
  }
  bool has(int32_t rank) const {
    const auto* first = first_from(rank);
    return first != nullptr && first->rank == rank;
  }
  // The first push of the least rank that is not less than `rank`; null: none.
  const ServerOperation* first_from(int32_t rank) const {
    const auto at = lower_bound(rank);
    return at == pushes_.end() ? nullptr : at->get();
  }
  void add(const ServerOperationPtr& push) {
    num_ranks_ += has(push->rank) ? 0 : 1;
    pushes_.insert(lower_bound(push->rank + 1), push);
  }
  // Takes the rank's first one. REQUIRES: has(rank).
  ServerOperationPtr pop(int32_t rank) {
    const auto at = lower_bound(rank);
    ServerOperationPtr push = *at;
    pushes_.erase(at);
    num_ranks_ -= has(rank) ? 0 : 1;
    return push;
  }
  template <class F>
  void for_each(const F& f) const {
    std::for_each(pushes_.begin(), pushes_.end(), f);
  }
  void erase(int32_t rank) {
    num_ranks_ -= has(rank) ? 1 : 0;
    pushes_.erase(lower_bound(rank), lower_bound(rank + 1));
  }

 private:
  using Pushes = std::vector<ServerOperationPtr>;

  Pushes::const_iterator lower_bound(int32_t rank) const {
    return std::lower_bound(
        pushes_.begin(),
        pushes_.end(),
        rank,
        [](const ServerOperationPtr& push, int32_t least) {
          return push->rank < least;
        });
  }

  Pushes pushes_; // by rank; keeps its memory from round to round
  size_t num_ranks_ = 0;
};

enum class PeerState : uint8_t { kExpected, kUp, kLost, kClosed };

struct ServerSlice;
using ServerSlicePtr = std::shared_ptr<ServerSlice>;

// A worker, as a server sees it.
struct ServerPeer {
  ServerPeer(int32_t peer_rank, int64_t peer_inc, PeerState begins, Time now)
      : rank(peer_rank), inc(peer_inc), state(begins), heard(now) {}

  const int32_t rank;
  const int64_t inc;
  PeerState state;
  Time heard;
  int64_t floor = 0; // operations below have been answered: the worker knows
  InsertionMap<SliceId, ServerStream, SliceHash> streams;
  int64_t num_streams = 0; // so far
  bool any_failed = false; // of the streams, perhaps
  std::set<SliceId> ended; // streams that end with a delete, perhaps

  // An operation that has not been answered, or an answer.
  struct Entry {
    ServerStream* stream = nullptr;
    ServerOperationPtr operation;
    std::optional<ServerReply> reply;
    int64_t replied = 0; // number of the reply
    int64_t priority = 0; // of a reply that is a value
  };
  std::map<int64_t, Entry> entries; // by opno
  PieceQueue queue; // of values
  bool has_pieces = false; // that may be sent, perhaps

  struct Lease {
    ServerSlicePtr slice;
    size_t slot = 0;
  };
  InsertionMap<int64_t, Lease> leases; // opno -> what the worker may read
  struct Entered {
    int64_t phase;
    int64_t opno;
  };
  std::optional<Entered> entered; // a barrier
  ServerOperationPtr meeting; // while it waits for the others in one
};

// A slice of a key, or several that are one for the time being: those of a
// list whose operations are all on the list. These have their counts, values,
// pushes and pulls in the list's slice until it is taken apart.
struct ServerSlice : std::enable_shared_from_this<ServerSlice> {
  SliceId id;
  ServerSlice* joint = nullptr; // the list's
  size_t place = 0; // in the list
  // Of a list:
  SliceListPtr list;
  std::vector<ServerSlicePtr> parts;
  std::shared_ptr<const std::vector<RoundPart>> round_parts;

  // For errors: of a list, its first slice.
  SliceId first_id() const {
    return list ? list->slice(0) : id;
  }
  // What has the counts of this slice.
  const ServerSlice& current_state() const {
    return joint ? *joint : *this;
  }

  std::shared_ptr<const KeySpec> spec;
  int64_t num_elements = 0;
  int64_t kid = 0;

  // Without leases, slots[0] is the value and slots[1] is not used; a round
  // has the value while it is worked on.
  std::array<ValuePtr, 2> slots;
  size_t current = 0; // the slot of this version
  using LeaseId = std::tuple<int32_t, int64_t, int64_t>; // rank, inc, opno
  std::array<std::set<LeaseId>, 2> leases; // of each slot

  RoundPtr busy; // nothing reads or writes the value meanwhile
  bool applying = false; // the busy round's Apply has been asked for
  bool dying = false; // the last member has gone while it was busy
  std::vector<ServerOperationPtr> norms; // that wait to be measured
  int64_t version = 0;
  int64_t gen = 0; // of the options last used; never goes back
  int64_t snap = 0; // the last snapshot that this slice is in

  struct Member {
    int64_t applied = 0; // pushes: the member's clock
    int64_t received = 0; // pushes that have begun
    bool attached = false;
  };
  InsertionMap<int32_t, Member> members; // by rank
  std::set<int32_t> gone; // have deleted this incarnation
  PendingPushes pending;
  struct Pull {
    ServerOperationPtr operation; // kPull, kPushPull or kDelete
    int64_t need; // of the rank's own pushes
  };
  std::vector<Pull> pulls;

  std::optional<Time> first_at; // since when the open round waits
  std::optional<Time> quorum_at; // since when it has its quorum
  Time waited = 0;
};

} // namespace torchkv::dist

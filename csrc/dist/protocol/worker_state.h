#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "action.h"
#include "piece_queue.h"
#include "request.h"

namespace torchkv::dist {

// Private to Worker.

// Indices of pieces. The first 64 need no memory.
class PieceSet {
 public:
  bool contains(int32_t index) const {
    const size_t word = static_cast<size_t>(index) / 64;
    return word < size() && ((at(word) & bit(index)) != 0);
  }
  // Whether it was new.
  bool insert(int32_t index) {
    const size_t word = static_cast<size_t>(index) / 64;
    if (word >= size()) {
      more_.resize(word);
    }
    uint64_t& bits = word == 0 ? first_ : more_[word - 1];
    const bool is_new = (bits & bit(index)) == 0;
    bits |= bit(index);
    return is_new;
  }

 private:
  static uint64_t bit(int32_t index) {
    return uint64_t{1} << (static_cast<uint32_t>(index) % 64);
  }
  size_t size() const {
    return 1 + more_.size();
  }
  uint64_t at(size_t word) const {
    return word == 0 ? first_ : more_[word - 1];
  }

  uint64_t first_ = 0;
  std::vector<uint64_t> more_;
};

// A server, as a worker sees it.
struct WorkerLink {
  LinkState state = LinkState::kHello;
  Time heard = 0;
  Time beat = -std::numeric_limits<Time>::infinity();
  int64_t sinc = 0;
  int64_t gen = 0; // of the options that it had when it said kWelcome
  PieceQueue queue;
  bool has_pieces = false; // that may be sent, perhaps
  std::deque<int64_t> outstanding; // operations without an answer, ascending
  std::set<int64_t> freeing; // leases that have ended, unconfirmed
  Time freed_at = 0;
};

struct WorkerList;
using WorkerListPtr = std::shared_ptr<WorkerList>;

// A slice, as a worker sees it; or, of index kServer, a server itself; or, of
// index kList, all slices of a list.
struct WorkerTable {
  SliceId slice;
  int32_t server = 0;
  size_t begin = 0; // in elements of the key
  size_t end = 0;
  size_t item_bytes = 1;

  size_t bytes() const {
    return (end - begin) * item_bytes;
  }
  // Of a whole key whose elements have `size` bytes.
  Blob part_of(const Blob& value, size_t size) const {
    return value.slice(begin * size, (end - begin) * size);
  }

  bool ready = false; // its init has been answered
  int64_t kid = 0;
  int64_t round = 0; // of the last push
  int64_t base = 0; // the latest version that has been pulled
  int64_t known = 0; // the latest version that has been heard of
  int64_t last = 0; // operation
  int32_t num_regions = 0;
  std::deque<RegionPtr> free_regions; // those that no operation has
  std::vector<int64_t> outstanding; // ascending
  // If there is one, its table has the counts of this slice.
  std::weak_ptr<WorkerList> list;

  // What has the counts: this, or the list's.
  inline const WorkerTable& current() const;
};
using WorkerTablePtr = std::shared_ptr<WorkerTable>;

// Slices whose operations are on all of them, which have seen the same.
struct WorkerList {
  SliceListPtr list;
  std::vector<WorkerTablePtr> parts;
  // Operations have the numbers of the first slice's.
  WorkerTablePtr table;
  // Until the first operation: `last` of each slice, if it must be listed.
  std::vector<int64_t> lasts;
};

const WorkerTable& WorkerTable::current() const {
  const auto joined = list.lock();
  return joined ? *joined->table : *this; // which lists_ keeps
}

// A key, as a worker sees it.
struct WorkerKey {
  KeySpec spec;
  std::vector<Place> places;
  std::vector<WorkerTablePtr> tables; // in the order of places
  bool deleted = false; // its delete has been sent; unknown to other calls

  // Of what an item pushes.
  size_t item_bytes(const Request::Item& item) const {
    return static_cast<size_t>(
        item.item_bytes > 0 ? item.item_bytes : spec.item_bytes);
  }
  // Whether that has the size of the key, or is codes for each slice.
  bool is_value(const Request::Item& item) const {
    return item.codes.empty() ? item.value.size() ==
            static_cast<size_t>(spec.total) * item_bytes(item)
                              : item.codes.size() == places.size();
  }
  // Whether that is one for each slice, if any.
  bool are_queries(const Request::Item& item) const {
    return item.queries.empty() || item.queries.size() == places.size();
  }
};

// Rank 0's part of a step in two phases: it belongs to no call, and goes on
// when its call has timed out.
struct WorkerStep {
  struct Part {
    WorkerTablePtr table;
    int64_t round = 0;
    double partial = 0;
  };
  CallId call = 0;
  std::vector<Part> parts; // in program order
  size_t num_measured = 0;
  std::function<double(double total)> factor;
};

struct WorkerOperation {
  // But for what differs from one sending to the next. `have` are the pieces of
  // the pulled value, in the order of arrival.
  Message request;
  WorkerTablePtr table;
  CallId call = 0;
  std::optional<size_t> result; // its place in the call's results
  std::optional<size_t> list_part; // of that, if the operation was on a list
  Blob value; // of the slice, without a region; or a query
  RegionPtr region; // the server's until its final answer
  PieceSet got; // the pieces that the server has
  PieceSet have;
  Blobs pieces; // of the pulled value
  std::optional<size_t> answer_bytes; // of a query
  struct Lease {
    int64_t kid = 0;
    int64_t version = 0;
    int64_t round = 0;
  };
  std::optional<Lease> lease;
  Time sent_at = 0;
  std::vector<int32_t> missing; // ranks that it waits for
  std::shared_ptr<WorkerStep> step; // kNorm
  size_t part = 0; // of the step
};

struct WorkerCall {
  Request request; // without the values that operations have
  Time deadline = 0;
  size_t left = 0; // operations
  bool begun = false; // has issued one
  bool met = false; // a barrier that has issued kMeet
  int64_t number = 0; // of the generation or the snapshot
  std::vector<std::pair<Key, KeySpec>> keys; // of the snapshot
  std::vector<SliceResult> results; // one for each operation, in their order
  bool has_parts = false; // in results
  std::optional<Error> thrown; // by the updater of the least slice
};

// An operation's answer.
struct WorkerAnswer {
  SliceResult result;
  int64_t phase = 0;
  double partial = 0;
};

} // namespace torchkv::dist

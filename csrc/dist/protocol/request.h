#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../../core/key.h"
#include "blob.h"
#include "message.h"
#include "slice.h"
#include "slice_list.h"

namespace torchkv::dist {

// A call of a worker. Calls on several keys are refused as a whole.
struct Request {
  enum class Kind : uint8_t {
    kInit,
    kPush,
    kPushPull,
    kPull,
    kDelete,
    kConfig, // rank 0 only
    kBarrier,
    kSnapshot, // rank 0 only
    kClose,
  };
  struct Query {
    Blob payload; // in an encoding that the core does not know
    size_t answer_bytes = 0; // of the part
  };
  struct Item {
    Key key = 0;
    // kPush, kPushPull, kPull: if not null, the item is on these keys, `value`
    // has their values one after the other, and there are no codes, queries or
    // `own`. Its slices' results may be one, or one each. REQUIRES: keys that
    // have one slice, of at most Config::piece_bytes, on one server.
    SliceListPtr list;
    KeySpec spec; // kInit
    // The whole key, contiguous: kPush, kPushPull, rank 0's kInit. Not written
    // until nothing refers to it any more.
    Blob value;
    // kPush, kPushPull: if not empty, the same, for slices on this rank's
    // server; those of `value` need not be there.
    Blob own;
    // kPush, kPushPull, and kInit of a row-sparse key: if not empty, instead of
    // the value, what is sent of each slice, in an encoding that the core does
    // not know.
    std::vector<Blob> codes;
    // kPull: if not empty, which part of each slice is asked for.
    std::vector<Query> queries;
    // kPush, kPushPull: of the value's elements, which travel as they are.
    int32_t dtype = 0; // c10::ScalarType
    int32_t item_bytes = 0; // 0: as the key's
    int64_t priority = 0;
    int64_t min_version = 0; // kPull

    // Of a list: whether the value has the size that it says, if any.
    bool has_list_value() const {
      const auto num_elements = static_cast<size_t>(list->num_elements());
      return codes.empty() && queries.empty() && own.size() == 0 &&
          (value.size() == 0 ||
           (item_bytes > 0 &&
            value.size() == num_elements * static_cast<size_t>(item_bytes)));
    }
    // Of a list: the same on one of its keys.
    Item part(size_t i) const {
      Item result;
      result.key = list->parts()[i].key;
      if (value.size() != 0) {
        result.value = list->part_of(value, i, static_cast<size_t>(item_bytes));
      }
      result.dtype = dtype;
      result.item_bytes = item_bytes;
      result.priority = priority;
      result.min_version = min_version;
      return result;
    }
    void drop_payloads() {
      value = own = Blob();
      codes.clear();
      queries.clear();
    }
  };
  Request() = default;
  explicit Request(Kind request_kind) : kind(request_kind) {}

  // Of all items.
  std::vector<Key> keys() const {
    std::vector<Key> result;
    for (const auto& item : items) {
      result.push_back(item.key);
      for (size_t i = 1; item.list && i < item.list->size(); ++i) {
        result.push_back(item.list->parts()[i].key);
      }
    }
    return result;
  }

  Kind kind = Kind::kBarrier;
  std::vector<Item> items; // distinct keys, also in lists
  bool two_phase = false; // kPush, kPushPull: clip by the norm of all items
  // Of rank 0 with two_phase: what becomes of the sum of the slices' partial
  // norms. A factor of 0, or one that is not finite, skips the updaters.
  std::function<double(double total)> factor;
  Blob options; // kConfig
  int64_t step = 0; // kSnapshot
};

inline bool is_push(Request::Kind kind) {
  return kind == Request::Kind::kPush || kind == Request::Kind::kPushPull;
}

// Memory for a push, in which servers of this host read it. Its destructor may
// give the memory back: the worker keeps it until no server reads it any more.
using RegionPtr = std::shared_ptr<const Region>;
// Memory for pushes of `bytes` bytes to `server`; null: the push travels in
// messages.
using AllocateRegion = std::function<RegionPtr(int32_t server, size_t bytes)>;

enum class LinkState : uint8_t { kHello, kUp, kLost };

} // namespace torchkv::dist

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "blob.h"
#include "config.h"
#include "message.h"

namespace torchkv::dist {

// A slice's stored value at one version: as init brought it, or a round's
// result. Drivers derive from it to keep more beside the bytes. The cores hold
// a value as long as an answer or a snapshot may need it and never read or
// write its bytes; a value that anything but its round refers to must not be
// written.
struct Value {
  Value() = default;
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;
  virtual ~Value() = default;
  // Of a list's value: that of its `i`th slice, in one piece.
  virtual std::shared_ptr<Value> part(size_t /*i*/) const {
    return nullptr;
  }
  // In order, each of Config::piece_bytes but the last.
  Blobs pieces;
  std::optional<Region> region; // in shared memory, with leases
  // The last (kid, version) in it that the core knows.
  int64_t kid = 0;
  int64_t version = 0;
};
using ValuePtr = std::shared_ptr<Value>;

// One worker's push of a slice, as it arrived.
struct Push {
  int32_t rank = 0;
  int64_t inc = 0;
  int64_t opno = 0;
  int64_t round = 0;
  int64_t base = 0;
  int64_t gen = 0;
  int64_t snap = 0;
  Rare<Group> group;
  Kind kind = Kind::kPush;
  bool is_encoded = false; // the pieces are codes or rows, not elements
  int32_t dtype = 0; // of the pushed elements, c10::ScalarType
  int32_t item_bytes = 0; // 0: as the key's
  Blobs pieces; // in order; sizes of elements add up to the slice's
  std::optional<Region> region; // instead of pieces
  int64_t number = 0; // of the operation, unique in the server; for the core
};

// A slice of a list, as an update needs it.
struct RoundPart {
  SliceId slice;
  std::shared_ptr<const KeySpec> spec;
  int64_t begin = 0; // of the list's elements
  int64_t num_elements = 0;

  // Of the stored values of all, one after the other.
  Blob of(const Blob& values) const {
    const auto size = static_cast<size_t>(spec->item_bytes);
    return values.slice(
        static_cast<size_t>(begin) * size,
        static_cast<size_t>(num_elements) * size);
  }
};

// One update of one slice: all that the work outside the core needs. Handed out
// by Apply and Measure, and back by on_measured and on_applied.
struct Round {
  SliceId slice;
  std::shared_ptr<const KeySpec> spec; // of the whole key
  // If not null, `slice` is the name of a list of these, whose updates are as
  // many. `source` has its parts, and so must `result`, whose pieces are one
  // blob. Each push has one piece, with the values one after the other.
  std::shared_ptr<const std::vector<RoundPart>> parts;
  int64_t num_elements = 0; // of the slice
  int64_t kid = 0;
  int64_t version = 0; // after it
  int64_t number = 0; // the first push's round
  std::vector<Push> pushes; // in rank order
  int64_t gen = 0; // generation of the options
  Blob options; // of rank 0's kConfig; empty: none has been sent
  ValuePtr source; // the value before
  // With leases: the value to write, perhaps `source`. Else null: the value may
  // be written in place if nothing else refers to `source`.
  ValuePtr target;
  // Values in snapshots that `target` holds: copy them before it is written.
  std::vector<std::shared_ptr<struct Shot>> shots;
  bool in_snapshot = false; // whether a snapshot refers to `source`
  Rare<Group> group; // of a step in two phases
  double partial = 0; // set by the driver before on_measured
  double factor = 1; // 0: the updater is not called
  ValuePtr result; // set by the driver before on_applied
  // Of a list: what the updater has thrown for each slice. Empty: the same as
  // on_applied says for all.
  std::vector<std::optional<std::string>> errors;
  Time waited = 0;
  Time begun = 0;
  bool measured = false;
  int32_t slot = 0;
  // Private to Server: what this has been taken apart into, and the other way.
  std::vector<std::shared_ptr<Round>> apart;
  std::weak_ptr<Round> whole;
};
using RoundPtr = std::shared_ptr<Round>;

// A slice as a snapshot keeps it.
struct Shot {
  KeySpec spec;
  ValuePtr value;
  int64_t version = 0;
  int64_t gen = 0;
  int64_t kid = 0;
};

// What a server's part of a snapshot holds.
struct Shard {
  int64_t number = 0; // of the snapshot
  int64_t job = 0;
  int32_t server = 0;
  int64_t gen = 0;
  std::vector<std::pair<SliceId, std::shared_ptr<Shot>>> slices;
  std::vector<std::pair<SliceId, int64_t>> births; // incarnations so far
  std::vector<std::pair<int64_t, Blob>> options; // by generation
};

// What joins the shards of a snapshot: writing it commits the snapshot.
struct Manifest {
  int64_t number = 0;
  int64_t job = 0;
  int64_t step = 0;
  int32_t num_servers = 0;
  std::vector<std::pair<Key, KeySpec>> keys;
};

} // namespace torchkv::dist

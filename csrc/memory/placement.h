#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../core/export.h"
#include "../core/place.h"
#include "entry.h"
#include "parts.h"
#include "shard.h"
#include "slices.h"

namespace torchkv {

// The places over which stored values are sharded. By default these are the
// accelerators of a call's tensors.
//
// TORCHKV_PLACES="cuda:0,cuda:0,cuda:0,cuda:0" makes one device act as several,
// to test the store type "device": the n-th tensor of a list on a device is at
// its n-th place or, beyond that, at the last. Each place has its own stream
// (Streams). "cpu,cpu" works, too. Immutable.
class TORCHKV_API Places {
 public:
  // Parses TORCHKV_PLACES. ValueError unless it is a list of valid devices.
  explicit Places(const std::string& text = {});
  // The value of TORCHKV_PLACES, or an empty string.
  static std::string environment();

  // Whether one device acts as several.
  bool are_logical() const {
    return !listed_.empty();
  }

  // The distinct places of the tensors of an item; none if all are in CPU
  // memory.
  using List = c10::SmallVector<Place, 8>;
  List of(const Item& item) const;

 private:
  void add(c10::Device device, size_t nth, List& result) const;

  std::vector<Place> listed_;
};

// Decides where stored values live, and moves them there.
//
// Thread safety: as Slices.
class TORCHKV_API Placement {
 public:
  // Where values live.
  enum class Policy : uint8_t {
    kCpu, // in CPU memory
    // Where their first value is, until a call brings tensors at several
    // places: then all values of the call are sharded evenly, as one.
    kShardAll,
    // The same, but each value is sharded by itself, into slices of one size.
    kShardEach,
  };

  Placement(Policy policy, Slices& slices, Streams& streams, Places places)
      : policy_(policy),
        slices_(slices),
        streams_(streams),
        places_(std::move(places)) {}

  // Gives a new entry its value: a copy of `value` or, to share, that tensor.
  void store(Entry& entry, const at::Tensor& value, bool share = false);

  // Takes over the entry of another store.
  void adopt(Entry& entry);

  // Moves entries whose place is not decided yet to where the values and outs
  // of a call say that they belong. `may_shard`: the updater does not need to
  // see whole values. REQUIRES: distinct entries.
  void place(c10::ArrayRef<Item> items, bool may_shard);

  // Merges the slices into one, until the next call that may shard the value.
  void gather(Entry& entry);

 private:
  void replace(Entry& entry, c10::SmallVector<Slice, 1> slices);
  Place least_loaded(c10::ArrayRef<Place> places);
  void place_whole(c10::SmallVectorImpl<const Item*>& items);
  void shard(c10::ArrayRef<const Item*> items, c10::ArrayRef<Place> places);
  void move(
      Entry& entry,
      c10::ArrayRef<Place> places,
      c10::ArrayRef<Shard> shards);
  using Load = std::atomic<int64_t>; // bytes of values
  std::shared_ptr<Load> load_of(const Place& place);
  void add_load(const Entry& entry, Slice& slice);

  const Policy policy_;
  Slices& slices_;
  Streams& streams_;
  const Places places_;
  std::mutex loads_mutex_; // guards loads_
  std::vector<std::pair<Place, std::shared_ptr<Load>>> loads_;
};

} // namespace torchkv

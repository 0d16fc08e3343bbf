#include "placement.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <sstream>

namespace torchkv {
namespace {

// None unless the name is a device's.
std::optional<c10::Device> parse_device(const std::string& name) {
  try {
    const c10::Device device(name);
    if (device.is_cpu()) {
      return c10::Device(c10::kCPU); // without an index, as in tensors
    }
    return device.has_index() ? device : c10::Device(device.type(), 0);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

// Whether a slice stays in CPU memory only until a call brings an accelerator.
bool is_undecided(const Slice& slice) {
  return slice.home.device.is_cpu() && slice.home.index < 0;
}

// Whether all tensors of an item are on one device, that of a place.
bool are_all_on(const Item& item, const Place& place) {
  const auto are_on = [&](const auto& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const auto& tensor) {
      return tensor.device() == place.device;
    });
  };
  return are_on(item.values) && are_on(item.outs);
}

int64_t bytes_of(const Entry& entry, const Slice& slice) {
  return (slice.end - slice.begin) *
      static_cast<int64_t>(c10::elementSize(entry.meta.dtype));
}

} // namespace

std::string Places::environment() {
  const char* const text = std::getenv("TORCHKV_PLACES");
  return text == nullptr ? "" : text;
}

Places::Places(const std::string& text) {
  if (text.empty()) {
    return;
  }
  std::istringstream names(text + ','); // so that a last comma is seen
  for (std::string name; std::getline(names, name, ',');) {
    const auto device = parse_device(name);
    TORCH_CHECK_VALUE(
        device.has_value(),
        "create: expected TORCHKV_PLACES to be a list of devices like "
        "'cuda:0,cuda:0', but got '",
        text,
        "'");
    listed_.push_back({*device, static_cast<int32_t>(listed_.size())});
  }
}

// Adds the place of the `nth` tensor of a list on `device`.
void Places::add(c10::Device device, size_t nth, List& result) const {
  Place place{device};
  size_t num_seen = 0;
  for (const auto& candidate : listed_) {
    if (candidate.device == device) {
      place = candidate;
      if (num_seen++ == nth) {
        break;
      }
    }
  }
  const bool is_memory = place.device.is_cpu() && place.index < 0;
  if (!is_memory &&
      std::find(result.begin(), result.end(), place) == result.end()) {
    result.push_back(place);
  }
}

Places::List Places::of(const Item& item) const {
  List result;
  const auto add_all = [&](const auto& tensors) {
    for (const auto& tensor : tensors) {
      const c10::Device device = tensor.device();
      const auto nth = !are_logical()
          ? 0
          : std::count_if(tensors.begin(), &tensor, [&](const auto& before) {
              return before.device() == device;
            });
      add(device, static_cast<size_t>(nth), result);
    }
  };
  add_all(item.values);
  add_all(item.outs);
  return result;
}

std::shared_ptr<Placement::Load> Placement::load_of(const Place& place) {
  const std::lock_guard lock(loads_mutex_);
  for (const auto& [known, load] : loads_) {
    if (known == place) {
      return load;
    }
  }
  loads_.emplace_back(place, std::make_shared<Load>(0));
  return loads_.back().second;
}

// Adds the slice to the load of its home for as long as it exists. Freeing
// takes no lock: it may happen in a forked child.
void Placement::add_load(const Entry& entry, Slice& slice) {
  slice.load.reset();
  if (is_undecided(slice)) {
    return;
  }
  const auto load = load_of(slice.home);
  const int64_t bytes = bytes_of(entry, slice);
  *load += bytes;
  slice.load = std::shared_ptr<void>(
      nullptr, [load, bytes](void* /*null*/) { *load -= bytes; });
}

void Placement::adopt(Entry& entry) {
  for (auto& slice : entry.slices) {
    add_load(entry, slice);
  }
}

void Placement::store(Entry& entry, const at::Tensor& value, bool share) {
  if (share) {
    slices_.share(entry, value);
  } else {
    slices_.store(
        entry, value, {policy_ == Policy::kCpu ? c10::kCPU : value.device()});
  }
  adopt(entry);
}

void Placement::replace(Entry& entry, c10::SmallVector<Slice, 1> slices) {
  for (auto& slice : slices) {
    add_load(entry, slice);
  }
  entry.slices = std::move(slices);
  if (entry.device.is_cpu()) {
    entry.device = entry.slices[0].home.device;
  }
}

void Placement::place(c10::ArrayRef<Item> items, bool may_shard) {
  if (policy_ == Policy::kCpu) {
    return;
  }
  c10::SmallVector<const Item*, 4> whole;
  // Consecutive items with the same places are sharded together.
  c10::SmallVector<const Item*, 4> group;
  Places::List places_of_group;
  for (const auto& item : items) {
    const Entry& entry = *item.entry;
    const Slice& slice = entry.slices[0];
    const bool stays = entry.is_shared || entry.rows != nullptr ||
        entry.placing == Placing::kSharded ||
        (!may_shard && entry.placing == Placing::kWhole) ||
        (!places_.are_logical() && are_all_on(item, slice.home));
    if (stays) {
      continue;
    }
    Places::List places = places_.of(item);
    std::sort(places.begin(), places.end());
    if (may_shard && places.size() > 1) {
      if (places != places_of_group) {
        shard(group, places_of_group);
        group.clear();
        places_of_group = std::move(places);
      }
      group.push_back(&item);
    } else if (places.size() > 1 || (!places.empty() && is_undecided(slice))) {
      whole.push_back(&item);
    }
  }
  shard(group, places_of_group);
  place_whole(whole);
}

// Largest first, each at the place with the fewest bytes.
void Placement::place_whole(c10::SmallVectorImpl<const Item*>& items) {
  std::sort(items.begin(), items.end(), [&](const Item* a, const Item* b) {
    const int64_t a_bytes = bytes_of(*a->entry, a->entry->slices[0]);
    const int64_t b_bytes = bytes_of(*b->entry, b->entry->slices[0]);
    return a_bytes != b_bytes ? a_bytes > b_bytes
                              : a < b; // in the call's order
  });
  for (const auto* item : items) {
    const Places::List places = places_.of(*item);
    const Place home = least_loaded(places);
    Entry& entry = *item->entry;
    move(entry, home, Shard{0, 0, 0, entry.meta.num_elements});
    if (places.size() > 1) {
      entry.placing = Placing::kWhole;
    }
  }
}

Place Placement::least_loaded(c10::ArrayRef<Place> places) {
  return *std::min_element(
      places.begin(), places.end(), [&](const Place& a, const Place& b) {
        return *load_of(a) < *load_of(b);
      });
}

void Placement::shard(
    c10::ArrayRef<const Item*> items,
    c10::ArrayRef<Place> places) {
  // A smaller shard is not worth a copy, a launch or a message of its own.
  // Logical places exist for tests, which use small values.
  constexpr int64_t kGrain = int64_t{256} * 1024;
  const int64_t grain = places_.are_logical() ? 16 : kGrain;
  if (items.empty()) {
    return;
  }
  std::vector<ValueSize> sizes;
  std::vector<int64_t> loads;
  for (const auto& place : places) {
    loads.push_back(*load_of(place));
  }
  for (const auto* item : items) {
    const Entry& entry = *item->entry;
    sizes.push_back(
        {entry.meta.num_elements,
         static_cast<int64_t>(c10::elementSize(entry.meta.dtype))});
    const Slice& slice = entry.slices[0]; // the only one, which moves
    const auto* home = std::find(places.begin(), places.end(), slice.home);
    if (home != places.end()) {
      loads[static_cast<size_t>(home - places.begin())] -=
          bytes_of(entry, slice);
    }
  }
  const auto shards = policy_ == Policy::kShardEach
      ? shard_each(sizes, loads, grain)
      : shard_all(sizes, loads, grain);
  c10::ArrayRef<Shard> rest = shards;
  for (size_t i = 0; i < items.size(); ++i) {
    size_t count = 0;
    while (count < rest.size() && rest[count].value == i) {
      ++count;
    }
    move(*items[i]->entry, places, rest.slice(0, count));
    items[i]->entry->placing = Placing::kSharded;
    rest = rest.slice(count);
  }
}

// Moves the shards of a value, with what an optimizer keeps for it.
void Placement::move(
    Entry& entry,
    c10::ArrayRef<Place> places,
    c10::ArrayRef<Shard> shards) {
  const bool stays = shards.size() == 1 && entry.slices.size() == 1 &&
      places[shards[0].place] == entry.slices[0].home;
  if (stays) {
    return;
  }
  c10::SmallVector<Slice, 1> slices;
  for (const auto& shard : shards) {
    StreamOrder order(streams_);
    slices.push_back(slices_.make_slice(
        entry, places[shard.place], shard.begin, shard.end, order));
    for (auto& from : entry.slices) {
      slices_.copy_common(from, slices.back(), order);
    }
  }
  replace(entry, std::move(slices));
}

void Placement::gather(Entry& entry) {
  if (entry.slices.size() == 1) {
    return;
  }
  Places::List homes;
  for (const auto& slice : entry.slices) {
    homes.push_back(slice.home);
  }
  const Place home = least_loaded(homes);
  move(entry, home, Shard{0, 0, 0, entry.meta.num_elements});
  entry.placing = Placing::kWhole;
}

} // namespace torchkv

#include "slices.h"

#include <ATen/Functions.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <array>
#include <string>
#include <unordered_map>

#include "../core/plain_dispatch.h"
#include "../kernels/cpu/sum.h"
#include "layout.h"

namespace torchkv {
namespace {

// Whether a slice is in memory that is only there until a call brings an
// accelerator.
bool is_homeless(const Slice& slice) {
  return slice.home.device.is_cpu() && slice.home.index < 0;
}

// Whether all tensors of an item are on one device, that of a place.
bool are_all_on(const Item& item, const Place& place) {
  const auto is_there = [&](const at::Tensor& tensor) {
    return tensor.device() == place.device;
  };
  return std::all_of(
             item.values.begin(),
             item.values.end(),
             [&](const Value& value) { return is_there(*value.data); }) &&
      std::all_of(item.outs.begin(), item.outs.end(), is_there);
}

int64_t bytes_of(const Entry& entry, const Slice& slice) {
  return (slice.end - slice.begin) *
      static_cast<int64_t>(c10::elementSize(entry.meta.dtype));
}

} // namespace

std::shared_ptr<Slices::Load> Slices::load_of(const Place& place) {
  const std::lock_guard lock(loads_mutex_);
  for (const auto& [known, load] : loads_) {
    if (known == place) {
      return load;
    }
  }
  loads_.emplace_back(place, std::make_shared<Load>(0));
  return loads_.back().second;
}

// Counts a slice at its home for as long as it is there. Without a lock at the
// end, which may come in a forked child.
void Slices::take_account(const Entry& entry, Slice& slice) {
  slice.load.reset();
  if (is_homeless(slice)) {
    return;
  }
  const auto load = load_of(slice.home);
  const int64_t bytes = bytes_of(entry, slice);
  *load += bytes;
  slice.load = std::shared_ptr<void>(
      nullptr, [load, bytes](void* /*null*/) { *load -= bytes; });
}

void Slices::adopt(Entry& entry) {
  for (auto& slice : entry.slices) {
    take_account(entry, slice);
  }
}

at::Tensor Slices::allocate_like(
    const at::Tensor& model,
    c10::ScalarType dtype) {
  at::Tensor result =
      runtime_.allocate(model.sizes(), model.strides(), dtype, model.device());
  forbid_resize(result);
  return result;
}

// With uninitialised memory. REQUIRES: `order` outlives all use of the slice by
// this call.
Slice Slices::make_slice(
    const Entry& entry,
    const Place& home,
    int64_t begin,
    int64_t end,
    StreamOrder& order) {
  Slice slice;
  slice.begin = begin;
  slice.end = end;
  slice.home = home;
  order.enter(slice);
  const bool is_whole = end - begin == entry.meta.num_elements;
  slice.value = is_whole
      ? runtime_.allocate(
            entry.meta.sizes, entry.strides, entry.meta.dtype, home.device)
      : runtime_.allocate({end - begin}, {1}, entry.meta.dtype, home.device);
  forbid_resize(slice.value);
  return slice;
}

void Slices::copy(const at::Tensor& destination, const at::Tensor& source) {
  if (is_plain_cpu_copy(source, destination)) {
    kernels::cpu::CopyBatch batch;
    batch.add(source, destination);
    batch.run();
  } else {
    runtime_.copy(destination, source);
  }
}

void Slices::store(Entry& entry, const at::Tensor& value) {
  // A dense value keeps its memory format (channels_last, transposed), so that
  // gradients of the same format are added without a permuting copy.
  if (value.is_non_overlapping_and_dense()) {
    entry.strides.assign(value.strides().begin(), value.strides().end());
  } else {
    const auto strides = at::detail::defaultStrides(value.sizes());
    entry.strides.assign(strides.begin(), strides.end());
  }
  c10::SmallVector<Slice, 1> slices;
  {
    StreamOrder order(runtime_, events_, places_);
    const Place home{policy_ == Policy::kCpu ? c10::kCPU : value.device()};
    slices.push_back(make_slice(entry, home, 0, value.numel(), order));
    copy(slices[0].value, value);
  }
  replace(entry, std::move(slices));
}

// Lets an entry have other slices.
void Slices::replace(Entry& entry, c10::SmallVector<Slice, 1> slices) {
  for (auto& slice : slices) {
    take_account(entry, slice);
  }
  entry.slices = std::move(slices);
  if (entry.device.is_cpu()) {
    entry.device = entry.slices[0].home.device;
  }
}

void Slices::place(c10::ArrayRef<Item> items, bool may_cut) {
  if (policy_ == Policy::kCpu) {
    return;
  }
  c10::SmallVector<const Item*, 4> whole;
  // Neighbours of the same places are cut together.
  c10::SmallVector<const Item*, 4> group;
  Places::List places_of_group;
  for (const auto& item : items) {
    const Entry& entry = *item.entry;
    const Slice& slice = entry.slices[0];
    const bool stays = entry.placing == Placing::kCut ||
        (!may_cut && entry.placing == Placing::kWhole) ||
        (!places_.are_logical() && are_all_on(item, slice.home));
    if (stays) {
      continue;
    }
    Places::List places = places_.of(item);
    std::sort(places.begin(), places.end());
    if (may_cut && places.size() > 1) {
      if (places != places_of_group) {
        cut(group, places_of_group);
        group.clear();
        places_of_group = std::move(places);
      }
      group.push_back(&item);
    } else if (places.size() > 1 || (!places.empty() && is_homeless(slice))) {
      whole.push_back(&item);
    }
  }
  cut(group, places_of_group);
  place_whole(whole);
}

// Largest first, each at the place with the fewest bytes.
void Slices::place_whole(c10::SmallVectorImpl<const Item*>& items) {
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
    move(entry, home, Piece{0, 0, 0, entry.meta.num_elements});
    if (places.size() > 1) {
      entry.placing = Placing::kWhole;
    }
  }
}

Place Slices::least_loaded(c10::ArrayRef<Place> places) {
  return *std::min_element(
      places.begin(), places.end(), [&](const Place& a, const Place& b) {
        return *load_of(a) < *load_of(b);
      });
}

void Slices::cut(
    c10::ArrayRef<const Item*> items,
    c10::ArrayRef<Place> places) {
  // Less is not worth a copy, a launch or a message of its own. Places that
  // stand for devices are there to be tested.
  constexpr int64_t kGrain = int64_t{256} * 1024;
  const int64_t grain = places_.are_logical() ? 16 : kGrain;
  if (items.empty()) {
    return;
  }
  std::vector<Extent> extents;
  std::vector<int64_t> loads;
  for (const auto& place : places) {
    loads.push_back(*load_of(place));
  }
  for (const auto* item : items) {
    const Entry& entry = *item->entry;
    extents.push_back(
        {entry.meta.num_elements,
         static_cast<int64_t>(c10::elementSize(entry.meta.dtype))});
    const Slice& slice = entry.slices[0]; // the only one: it leaves
    const auto* home = std::find(places.begin(), places.end(), slice.home);
    if (home != places.end()) {
      loads[static_cast<size_t>(home - places.begin())] -=
          bytes_of(entry, slice);
    }
  }
  const auto pieces = policy_ == Policy::kCutEach
      ? cut_each(extents, loads, grain)
      : cut_all(extents, loads, grain);
  c10::ArrayRef<Piece> rest = pieces;
  for (size_t i = 0; i < items.size(); ++i) {
    size_t count = 0;
    while (count < rest.size() && rest[count].value == i) {
      ++count;
    }
    move(*items[i]->entry, places, rest.slice(0, count));
    items[i]->entry->placing = Placing::kCut;
    rest = rest.slice(count);
  }
}

// Moves the pieces of a value, with what an optimizer has made of it.
void Slices::move(
    Entry& entry,
    c10::ArrayRef<Place> places,
    c10::ArrayRef<Piece> pieces) {
  const bool stays = pieces.size() == 1 && entry.slices.size() == 1 &&
      places[pieces[0].place] == entry.slices[0].home;
  if (stays) {
    return;
  }
  c10::SmallVector<Slice, 1> slices;
  for (const auto& piece : pieces) {
    StreamOrder order(runtime_, events_, places_);
    slices.push_back(
        make_slice(entry, places[piece.place], piece.begin, piece.end, order));
    for (auto& from : entry.slices) {
      copy_part(from, slices.back(), order);
    }
  }
  replace(entry, std::move(slices));
}

// Copies what both slices have.
void Slices::copy_part(Slice& from, Slice& to, StreamOrder& order) {
  const int64_t begin = std::max(from.begin, to.begin);
  const int64_t end = std::min(from.end, to.end);
  if (begin >= end && from.begin != from.end) { // of an empty value, all
    return;
  }
  order.enter(from, to.home.device.is_cpu() ? from.home : to.home);
  const auto copy_member = [&](const at::Tensor& source,
                               at::Tensor& destination) {
    if (source.defined()) {
      if (!destination.defined()) {
        destination = allocate_like(to.value, source.scalar_type());
      }
      copy(
          part_of(destination, begin - to.begin, end - to.begin),
          part_of(source, begin - from.begin, end - from.begin));
    }
  };
  copy_member(from.value, to.value);
  copy_member(from.master, to.master);
  copy_member(from.accumulated, to.accumulated);
  for (size_t i = 0; i < kMaxStates; ++i) {
    copy_member(from.states[i], to.states[i]);
  }
}

void Slices::gather(Entry& entry) {
  if (entry.slices.size() == 1) {
    return;
  }
  Places::List homes;
  for (const auto& slice : entry.slices) {
    homes.push_back(slice.home);
  }
  const Place home = least_loaded(homes);
  move(entry, home, Piece{0, 0, 0, entry.meta.num_elements});
  entry.placing = Placing::kWhole;
}

at::Tensor& Slices::merge_buffer(Slice& slice) {
  if (!slice.merge_buffer.defined()) {
    slice.merge_buffer = allocate_like(slice.value, slice.value.scalar_type());
  }
  return slice.merge_buffer;
}

at::Tensor& Slices::accumulated(Slice& slice) {
  if (!slice.accumulated.defined()) {
    slice.accumulated =
        allocate_like(slice.value, at::toOpMathType(slice.value.scalar_type()));
  }
  return slice.accumulated;
}

bool Slices::prepare_state(
    Slice& slice,
    const RuleSpec& rule,
    std::vector<at::Tensor*>& made) {
  const auto stored = slice.value.scalar_type();
  const auto dtype = at::toOpMathType(stored);
  const PlainDispatch plain;
  if (dtype != stored && !slice.master.defined()) {
    at::Tensor master = allocate_like(slice.value, dtype);
    runtime_.copy(master, slice.value);
    slice.master = std::move(master);
    made.push_back(&slice.master);
  }
  const auto names = state_names(rule);
  bool all_there = true;
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr && !slice.states[i].defined()) {
      at::Tensor state = allocate_like(slice.value, dtype);
      // Real and imaginary parts are numbers of their own.
      (state.is_complex() ? at::view_as_real(state) : state)
          .fill_(
              rule.id == RuleSpec::Id::kAdagrad ? rule.initial_accumulator_value
                                                : 0);
      slice.states[i] = std::move(state);
      made.push_back(&slice.states[i]);
      all_there = false;
    }
  }
  return all_there;
}

at::Tensor Slices::empty_like(
    const Entry& entry,
    c10::ScalarType dtype,
    c10::Device device) {
  return runtime_.allocate(entry.meta.sizes, entry.strides, dtype, device);
}

// What a member of all slices holds, ordered with the current stream of
// `device`.
at::Tensor Slices::gathered(
    Entry& entry,
    c10::function_ref<const at::Tensor&(const Slice&)> member,
    c10::Device device) {
  at::Tensor result =
      empty_like(entry, member(entry.slices[0]).scalar_type(), device);
  StreamOrder order(runtime_, events_, places_);
  for (auto& slice : entry.slices) {
    order.enter(slice, device.is_cpu() ? slice.home : Place{device});
    copy(
        part_of(result, slice.begin, slice.end),
        part_of(member(slice), 0, slice.end - slice.begin));
  }
  return result;
}

at::Tensor Slices::copy_of(Entry& entry, c10::Device device) {
  return gathered(
      entry,
      [](const Slice& slice) -> const at::Tensor& { return slice.value; },
      device);
}

KeyState Slices::state_of(Entry& entry, const RuleSpec& rule) {
  KeyState state;
  state.step = entry.step;
  state.num_accumulated = entry.num_accumulated;
  const auto add = [&](const char* name, auto member) {
    if (member(entry.slices[0]).defined()) {
      state.tensors.emplace(name, gathered(entry, member, entry.device));
    }
  };
  const auto names = state_names(rule);
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr) {
      add(names[i], [i](const Slice& slice) -> const at::Tensor& {
        return slice.states[i];
      });
    }
  }
  add("master",
      [](const Slice& slice) -> const at::Tensor& { return slice.master; });
  if (state.num_accumulated != 0) {
    add("accumulated", [](const Slice& slice) -> const at::Tensor& {
      return slice.accumulated;
    });
  }
  return state;
}

void Slices::set_state(
    Entry& entry,
    const RuleSpec& rule,
    const KeyState& state) {
  const auto names = state_names(rule);
  // By name: the tensor, lying as the stored value does.
  std::unordered_map<std::string, at::Tensor> alike;
  for (const auto& [name, tensor] : state.tensors) {
    alike.emplace(name, lying_as(entry, tensor));
  }
  struct Parts {
    std::array<at::Tensor, kMaxStates> states;
    at::Tensor master;
    at::Tensor accumulated;
  };
  // All copies first: what fails for lack of memory changes nothing.
  std::vector<Parts> parts(entry.slices.size());
  {
    StreamOrder order(runtime_, events_, places_);
    for (size_t i = 0; i < parts.size(); ++i) {
      Slice& slice = entry.slices[i];
      order.enter(slice);
      const auto part_named = [&](const char* name) {
        const auto it = name == nullptr ? alike.end() : alike.find(name);
        if (it == alike.end()) {
          return at::Tensor();
        }
        at::Tensor part =
            allocate_like(slice.value, at::toOpMathType(entry.meta.dtype));
        order.use(slice.home, it->second.device());
        order.sync();
        copy(
            part_of(part, 0, slice.end - slice.begin),
            part_of(it->second, slice.begin, slice.end));
        return part;
      };
      for (size_t j = 0; j < kMaxStates; ++j) {
        parts[i].states[j] = part_named(names[j]);
      }
      parts[i].master = part_named("master");
      parts[i].accumulated = part_named("accumulated");
    }
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    Slice& slice = entry.slices[i];
    slice.states = std::move(parts[i].states);
    slice.master = std::move(parts[i].master);
    slice.accumulated = std::move(parts[i].accumulated);
  }
  entry.step = state.step;
  entry.num_accumulated = state.num_accumulated;
}

void Slices::clear_state(Entry& entry) {
  for (auto& slice : entry.slices) {
    slice.master.reset();
    slice.states = {};
    slice.accumulated.reset();
  }
  entry.step = 0;
  entry.num_accumulated = 0;
}

at::Tensor Slices::lying_as(const Entry& entry, const at::Tensor& tensor) {
  if (lies_as(entry, tensor)) {
    return tensor;
  }
  at::Tensor result = empty_like(entry, tensor.scalar_type(), tensor.device());
  copy(result, tensor);
  return result;
}

} // namespace torchkv

#include "slices.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <array>
#include <string>
#include <unordered_map>

#include "../core/plain_dispatch.h"
#include "../kernels/cpu/sum.h"
#include "layout.h"

namespace torchkv {

void init_state(
    const at::Tensor& state,
    const RuleSpec* rule,
    size_t place,
    const at::Tensor& weight) {
  const PlainDispatch plain;
  if (rule != nullptr && begins_as_weight(*rule, place)) {
    state.copy_(weight);
    return;
  }
  // Real and imaginary parts count as separate numbers.
  (state.is_complex() ? at::view_as_real(state) : state)
      .fill_(
          rule != nullptr && rule->id == RuleSpec::Id::kAdagrad
              ? rule->initial_accumulator_value
              : 0);
}

at::Tensor Slices::allocate_value(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    c10::ScalarType dtype,
    c10::Device device) {
  at::Tensor value = allocator_ == nullptr
      ? runtime_.allocate(sizes, strides, dtype, device)
      : allocator_(sizes, strides, dtype, device);
  forbid_resize(value);
  return value;
}

at::Tensor Slices::allocate_like(
    const at::Tensor& model,
    c10::ScalarType dtype) {
  at::Tensor result = runtime_.allocate_like(model, dtype);
  forbid_resize(result);
  return result;
}

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
  slice.enter(order);
  const bool is_whole = end - begin == entry.meta.num_elements;
  slice.value = is_whole
      ? allocate_value(
            entry.meta.sizes, entry.strides, entry.meta.dtype, home.device)
      : allocate_value({end - begin}, {1}, entry.meta.dtype, home.device);
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

void Slices::store(Entry& entry, const at::Tensor& value, const Place& home) {
  // A dense value keeps its memory format (channels_last, transposed), so that
  // gradients of the same format are added without a permuting copy.
  if (value.is_non_overlapping_and_dense()) {
    entry.strides.assign(value.strides().begin(), value.strides().end());
  } else {
    const auto strides = at::detail::defaultStrides(value.sizes());
    entry.strides.assign(strides.begin(), strides.end());
  }
  StreamOrder order(streams_);
  Slice slice = make_slice(entry, home, 0, value.numel(), order);
  copy(slice.value, value);
  entry.slices.push_back(std::move(slice));
  entry.device = home.device;
}

void Slices::share(Entry& entry, const at::Tensor& value) {
  entry.strides.assign(value.strides().begin(), value.strides().end());
  entry.device = value.device();
  entry.is_shared = true;
  Slice slice;
  slice.end = value.numel();
  slice.home = {value.device()};
  // With the version counter of the caller's tensor, and not its gradient.
  c10::TensorImpl& impl = *value.unsafeGetTensorImpl();
  slice.value = at::Tensor(impl.shallow_copy_and_detach(
      impl.version_counter(), /*allow_tensor_metadata_change=*/false));
  entry.slices.push_back(std::move(slice));
}

void Slices::note_written(const Entry& entry) {
  if (entry.is_shared && !entry.slices[0].value.is_inference()) {
    entry.slices[0].value.unsafeGetTensorImpl()->bump_version();
  }
}

void Slices::follow_writes(const Slice& slice) {
  const PlainDispatch plain;
  const auto as_real = [](const at::Tensor& tensor) {
    return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  };
  const auto wide = slice.master.scalar_type();
  const at::Tensor master = as_real(slice.master);
  const at::Tensor value = as_real(slice.value.to(wide));
  const at::Tensor rounded =
      as_real(slice.master.to(slice.value.scalar_type()).to(wide));
  master.copy_(at::where(rounded.eq(value), master, value));
}

// Copies the slice's shard of a whole tensor, which has the memory layout of
// the stored value.
void Slices::copy_shard(
    const Slice& slice,
    const at::Tensor& destination,
    const at::Tensor& whole,
    StreamOrder& order) {
  order.use(slice.home, whole.device());
  order.sync();
  copy(
      part_of(destination, 0, slice.end - slice.begin),
      part_of(whole, slice.begin, slice.end));
}

bool Slices::master_rounds_to(Entry& entry, const at::Tensor& value) {
  if (!entry.slices[0].master.defined() ||
      value.scalar_type() != entry.meta.dtype) {
    return false;
  }
  const PlainDispatch plain;
  const at::Tensor whole =
      gathered(entry, std::mem_fn(&Slice::master), value.device());
  return at::equal(whole.to(value.scalar_type()), value);
}

void Slices::assign(Entry& entry, const at::Tensor& value, bool keep_master) {
  StreamOrder order(streams_);
  for (auto& slice : entry.slices) {
    slice.enter(order);
    copy_shard(slice, slice.value, value, order);
    if (slice.master.defined() && !keep_master) {
      // In full precision, which the stored dtype rounds.
      copy_shard(slice, slice.master, value, order);
    }
  }
  note_written(entry);
}

at::Tensor Slices::lease(Entry& entry) {
  if (entry.slices.size() != 1 || !entry.device.is_cpu() || entry.is_shared) {
    return copy_of(entry, entry.device);
  }
  Slice& slice = entry.slices[0];
  slice.is_leased = true;
  const PlainDispatch plain;
  return at::alias(slice.value);
}

void Slices::end_lease(Slice& slice) {
  slice.is_leased = false;
  if (slice.value.storage().use_count() == 1) {
    // use_count() is a relaxed load; releasing another owner acquires what the
    // last reader has released, so its reads happen before the update.
    const c10::Storage owner = slice.value.storage();
  } else {
    const at::Tensor leased = slice.value;
    at::Tensor value = allocate_value(
        leased.sizes(),
        leased.strides(),
        leased.scalar_type(),
        leased.device());
    copy(value, leased);
    slice.value = std::move(value);
  }
}

void Slices::copy_common(Slice& from, Slice& to, StreamOrder& order) {
  const int64_t begin = std::max(from.begin, to.begin);
  const int64_t end = std::min(from.end, to.end);
  if (begin >= end && from.begin != from.end) { // except of an empty value
    return;
  }
  from.enter(order, to.home.device.is_cpu() ? from.home : to.home);
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
      init_state(
          state, &rule, i, slice.master.defined() ? slice.master : slice.value);
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
  c10::SmallVector<int64_t, 4> sizes(entry.meta.sizes);
  if (entry.rows != nullptr) {
    sizes[0] = entry.rows->size();
  }
  return runtime_.allocate(sizes, entry.strides, dtype, device);
}

// A member of all slices as one tensor, ordered with the current stream of
// `device`.
at::Tensor Slices::gathered(
    Entry& entry,
    c10::function_ref<const at::Tensor&(const Slice&)> member,
    c10::Device device) {
  at::Tensor result =
      empty_like(entry, member(entry.slices[0]).scalar_type(), device);
  StreamOrder order(streams_);
  for (auto& slice : entry.slices) {
    slice.enter(order, device.is_cpu() ? slice.home : Place{device});
    copy(
        part_of(result, slice.begin, slice.end),
        part_of(member(slice), 0, slice.end - slice.begin));
  }
  return result;
}

at::Tensor Slices::copy_of(Entry& entry, c10::Device device) {
  return gathered(entry, std::mem_fn(&Slice::value), device);
}

KeyState Slices::state_of(Entry& entry, const RuleSpec& rule) {
  if (entry.is_shared && entry.slices[0].master.defined()) {
    StreamOrder order(streams_);
    entry.slices[0].enter(order);
    follow_writes(entry.slices[0]);
  }
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
  add("master", std::mem_fn(&Slice::master));
  if (state.num_accumulated != 0) {
    add("accumulated", std::mem_fn(&Slice::accumulated));
  }
  return state;
}

void Slices::set_state(
    Entry& entry,
    const RuleSpec& rule,
    const KeyState& state) {
  const auto names = state_names(rule);
  std::unordered_map<std::string, at::Tensor> whole;
  for (const auto& [name, tensor] : state.tensors) {
    whole.emplace(name, laid_out_as(entry, tensor));
  }
  struct Kept {
    std::array<at::Tensor, kMaxStates> states;
    at::Tensor master;
    at::Tensor accumulated;
  };
  // All copies first: running out of memory changes nothing.
  std::vector<Kept> kept(entry.slices.size());
  {
    StreamOrder order(streams_);
    for (size_t i = 0; i < kept.size(); ++i) {
      Slice& slice = entry.slices[i];
      slice.enter(order);
      const auto shard_named = [&](const char* name) {
        const auto it = name == nullptr ? whole.end() : whole.find(name);
        if (it == whole.end()) {
          return at::Tensor();
        }
        at::Tensor shard =
            allocate_like(slice.value, at::toOpMathType(entry.meta.dtype));
        copy_shard(slice, shard, it->second, order);
        return shard;
      };
      for (size_t j = 0; j < kMaxStates; ++j) {
        kept[i].states[j] = shard_named(names[j]);
      }
      kept[i].master = shard_named("master");
      kept[i].accumulated = shard_named("accumulated");
    }
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    Slice& slice = entry.slices[i];
    slice.states = std::move(kept[i].states);
    slice.master = std::move(kept[i].master);
    slice.accumulated = std::move(kept[i].accumulated);
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

at::Tensor Slices::laid_out_as(const Entry& entry, const at::Tensor& tensor) {
  if (has_layout_of(entry, tensor)) {
    return tensor;
  }
  at::Tensor result = empty_like(entry, tensor.scalar_type(), tensor.device());
  copy(result, tensor);
  return result;
}

} // namespace torchkv

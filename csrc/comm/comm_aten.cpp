// Comm for every device that PyTorch knows. Which tensors can go through the
// raw CPU kernels is decided here; the arithmetic is in kernels/.
#include "comm_aten.h"

#include <ATen/Functions.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <vector>

#include "../errors.h"
#include "../kernels/cpu/sum.h"
#include "../plain_dispatch.h"
#include "cuda_batch.h"
#include "outs.h"
#include "step_with_aten.h"

namespace torchkv {
namespace {

// Whether the tensor's memory holds its numbers as they are.
bool is_plain_cpu(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && !tensor.is_conj() && !tensor.is_neg() &&
      !tensor._is_zerotensor();
}

// Whether the raw kernels can copy one into the other. Both have one shape.
bool is_plain_copy(const at::Tensor& source, const at::Tensor& out) {
  return is_plain_cpu(source) && is_plain_cpu(out) &&
      source.scalar_type() == out.scalar_type() &&
      kernels::cpu::lie_alike(source, out) &&
      source.is_non_overlapping_and_dense();
}

bool are_plain_cpu(c10::ArrayRef<Value> values) {
  return std::all_of(values.begin(), values.end(), [](const Value& value) {
    return is_plain_cpu(*value.data);
  });
}

bool lie_alike(c10::ArrayRef<Value> values, const at::Tensor& result) {
  return std::all_of(values.begin(), values.end(), [&](const Value& value) {
    return kernels::cpu::lie_alike(*value.data, result);
  });
}

// PyTorch promotes fp8 with nothing but itself, and uint16, uint32 and uint64
// with no integer. int64 holds the same bits of a sum of integers as any of
// them.
c10::ScalarType promotable(c10::ScalarType dtype) {
  if (c10::isFloat8Type(dtype)) {
    return c10::kFloat;
  }
  return c10::isBarebonesUnsignedType(dtype) ? c10::kLong : dtype;
}

c10::ScalarType accumulation_type(
    c10::ArrayRef<Value> values,
    c10::ScalarType stored) {
  c10::ScalarType dtype = promotable(stored);
  for (const auto& value : values) {
    dtype = c10::promoteTypes(dtype, promotable(value.data->scalar_type()));
  }
  return at::toOpMathType(dtype);
}

// Whether there is none yet of what the rule needs.
bool lacks_state(const Slice& slice, const RuleSpec& rule) {
  const auto stored = slice.value.scalar_type();
  const auto names = state_names(rule);
  bool lacks = !slice.master.defined() && at::toOpMathType(stored) != stored;
  for (size_t i = 0; i < kMaxStates; ++i) {
    lacks = lacks || (names[i] != nullptr && !slice.states[i].defined());
  }
  return lacks;
}

} // namespace

// Sums and copies that are carried out together.
struct CommAten::Work {
  Work(CommAten& comm, StreamOrder& order)
      : cuda_sums(comm.runtime_, order, comm.peers_) {}

  void run() {
    sums.run();
    cuda_sums.run();
  }

  kernels::cpu::SumBatch sums;
  CudaBatch cuda_sums;
};

at::Tensor CommAten::allocate(
    const at::Tensor& model,
    c10::Device device,
    bool for_the_store) {
  // A dense value keeps its memory format (channels_last, transposed), so that
  // gradients of the same format are added without a permuting copy.
  const auto strides = model.is_non_overlapping_and_dense()
      ? c10::SmallVector<int64_t, 4>(model.strides())
      : c10::SmallVector<int64_t, 4>(at::detail::defaultStrides(model.sizes()));
  at::Tensor result =
      runtime_.allocate(model.sizes(), strides, model.scalar_type(), device);
  if (for_the_store) {
    forbid_resize(result);
  }
  return result;
}

Slice CommAten::make_slice(const at::Tensor& value, c10::Device home) {
  Slice slice;
  slice.end = value.numel();
  slice.home = home;
  slice.value = allocate(value, home, /*for_the_store=*/true);
  {
    StreamOrder order(runtime_, events_);
    order.enter(slice);
    copy(value, slice.value);
  }
  return slice;
}

void CommAten::store(Entry& entry, const at::Tensor& value) {
  const c10::Device home =
      home_ == Home::kCpu ? c10::Device(c10::kCPU) : value.device();
  entry.slices.push_back(make_slice(value, home));
  entry.placed = home_ == Home::kCpu || !home.is_cpu();
  if (!home.is_cpu()) {
    const std::lock_guard lock(loads_mutex_);
    loads_[home] += static_cast<int64_t>(value.nbytes());
  }
}

void CommAten::place(c10::ArrayRef<Item> items) {
  c10::SmallVector<const Item*, 4> by_size;
  for (const auto& item : items) {
    by_size.push_back(&item);
  }
  std::sort(by_size.begin(), by_size.end(), [](const auto* a, const auto* b) {
    const auto a_bytes = a->entry->slices[0].value.nbytes();
    const auto b_bytes = b->entry->slices[0].value.nbytes();
    return a_bytes != b_bytes ? a_bytes > b_bytes
                              : a < b; // in the call's order
  });
  for (const auto* item : by_size) {
    c10::SmallVector<c10::Device, 4> candidates;
    const auto add = [&](const at::Tensor& tensor) {
      if (!tensor.device().is_cpu()) {
        candidates.push_back(tensor.device());
      }
    };
    for (const auto& value : item->values) {
      add(*value.data);
    }
    std::for_each(item->outs.begin(), item->outs.end(), add);
    if (candidates.empty()) {
      continue;
    }
    Entry& entry = *item->entry;
    c10::Device home = c10::kCPU;
    {
      const std::lock_guard lock(loads_mutex_);
      home = *std::min_element(
          candidates.begin(), candidates.end(), [&](auto a, auto b) {
            return loads_[a] < loads_[b];
          });
      loads_[home] += static_cast<int64_t>(entry.slices[0].value.nbytes());
    }
    entry.slices[0] = moved(entry.slices[0], home);
    entry.placed = true;
  }
}

// With what an optimizer has made of it.
Slice CommAten::moved(const Slice& slice, c10::Device home) {
  Slice result = make_slice(slice.value, home);
  {
    StreamOrder order(runtime_, events_);
    order.enter(result);
    const auto copy = [&](const at::Tensor& from, at::Tensor& to) {
      if (from.defined()) {
        to = allocate_state(result, from.scalar_type());
        runtime_.copy(to, from);
      }
    };
    copy(slice.master, result.master);
    copy(slice.accumulated, result.accumulated);
    for (size_t i = 0; i < kMaxStates; ++i) {
      copy(slice.states[i], result.states[i]);
    }
  }
  return result;
}

void CommAten::copy(const at::Tensor& value, const at::Tensor& result) {
  if (is_plain_copy(value, result)) {
    kernels::cpu::CopyBatch batch;
    batch.add(value, result);
    batch.run();
  } else {
    runtime_.copy(result, value);
  }
}

at::Tensor CommAten::allocate_state(const Slice& slice, c10::ScalarType dtype) {
  at::Tensor result = runtime_.allocate(
      slice.value.sizes(), slice.value.strides(), dtype, slice.home);
  forbid_resize(result);
  return result;
}

bool CommAten::prepare_state(
    Slice& slice,
    const RuleSpec& rule,
    std::vector<at::Tensor*>& made) {
  const auto stored = slice.value.scalar_type();
  const auto dtype = at::toOpMathType(stored);
  const PlainDispatch plain;
  if (dtype != stored && !slice.master.defined()) {
    at::Tensor master = allocate_state(slice, dtype);
    runtime_.copy(master, slice.value);
    slice.master = std::move(master);
    made.push_back(&slice.master);
  }
  const auto names = state_names(rule);
  bool all_there = true;
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr && !slice.states[i].defined()) {
      at::Tensor state = allocate_state(slice, dtype);
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

KeyState CommAten::state_of(Entry& entry, const RuleSpec& rule) {
  Slice& slice = entry.slices[0];
  StreamOrder order(runtime_, events_);
  order.enter(slice);
  KeyState state;
  state.step = entry.step;
  state.num_accumulated = entry.num_accumulated;
  const auto add = [&](const char* name, const at::Tensor& tensor) {
    if (tensor.defined()) {
      at::Tensor copied = runtime_.allocate(
          tensor.sizes(), tensor.strides(), tensor.scalar_type(), slice.home);
      copy(tensor, copied);
      state.tensors.emplace(name, std::move(copied));
    }
  };
  const auto names = state_names(rule);
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr) {
      add(names[i], slice.states[i]);
    }
  }
  add("master", slice.master);
  if (state.num_accumulated != 0) {
    add("accumulated", slice.accumulated);
  }
  return state;
}

void CommAten::set_state(
    Entry& entry,
    const RuleSpec& rule,
    const KeyState& state) {
  Slice& slice = entry.slices[0];
  StreamOrder order(runtime_, events_);
  order.enter(slice);
  const auto copy_of = [&](const char* name) {
    at::Tensor tensor;
    const auto it =
        name == nullptr ? state.tensors.end() : state.tensors.find(name);
    if (it != state.tensors.end()) {
      tensor =
          allocate_state(slice, at::toOpMathType(slice.value.scalar_type()));
      copy(it->second, tensor);
    }
    return tensor;
  };
  // All copies first: what fails for lack of memory changes nothing.
  const auto names = state_names(rule);
  std::array<at::Tensor, kMaxStates> states;
  for (size_t i = 0; i < kMaxStates; ++i) {
    states[i] = copy_of(names[i]);
  }
  at::Tensor master = copy_of("master");
  at::Tensor accumulated = copy_of("accumulated");
  slice.states = std::move(states);
  slice.master = std::move(master);
  slice.accumulated = std::move(accumulated);
  entry.step = state.step;
  entry.num_accumulated = state.num_accumulated;
}

void CommAten::clear_state(Entry& entry) {
  for (auto& slice : entry.slices) {
    slice.master.reset();
    slice.states = {};
    slice.accumulated.reset();
  }
  entry.step = 0;
  entry.num_accumulated = 0;
}

at::Tensor CommAten::sum_of(
    c10::ArrayRef<Value> values,
    const Slice& slice,
    c10::ScalarType dtype,
    StreamOrder& order) {
  at::Tensor total = runtime_.allocate(
      slice.value.sizes(), slice.value.strides(), dtype, slice.home);
  Work work(*this, order);
  reduce_into(values, total, work);
  work.run();
  return total;
}

// Adds the sum to the work, or carries it out.
void CommAten::reduce_into(
    c10::ArrayRef<Value> values,
    const at::Tensor& result,
    Work& work) {
  const bool is_there = values.size() == 1 && values[0].data->is_same(result);
  if (result.numel() == 0 || is_there) {
    return;
  }
  const auto dtype = accumulation_type(values, result.scalar_type());
  if (result.device().is_cpu() && are_plain_cpu(values)) {
    if (lie_alike(values, result)) {
      work.sums.add(values, result, dtype);
    } else {
      kernels::cpu::sum_strided(values, result, dtype);
    }
    return;
  }
  if (work.cuda_sums.add(values, result, dtype)) {
    return;
  }
  if (values.size() == 1) {
    runtime_.copy(result, *values[0].data);
    return;
  }
  const PlainDispatch plain;
  const auto brought = [&](const Value& value, bool copy) {
    return value.data->to(result.device(), dtype, /*non_blocking=*/false, copy);
  };
  at::Tensor total = brought(values[0], /*copy=*/true);
  for (const auto& value : values.slice(1)) {
    total.add_(brought(value, /*copy=*/false));
  }
  runtime_.copy(result, total);
}

// A step that is ready to be made, and what it needs until the batch has run.
struct CommAten::Ready {
  enum class Way : uint8_t { kBatch, kStrided, kDevice };

  Way way = Way::kBatch;
  RuleStep step;
  at::Tensor total; // the sum, where the batch cannot make it
};

// The values of an item, after what its entry has accumulated.
c10::SmallVector<Value, 8> CommAten::gradients_of(const Item& item) {
  c10::SmallVector<Value, 8> values;
  if (item.entry->num_accumulated != 0) {
    values.push_back({Value::Form::kDense, &item.entry->slices[0].accumulated});
  }
  values.append(item.values.begin(), item.values.end());
  return values;
}

CommAten::Ready CommAten::ready(const Item& item, StreamOrder& order) {
  Slice& slice = item.entry->slices[0];
  Ready result;
  result.step = *item.step;
  if (!slice.home.is_cpu()) {
    result.way = Ready::Way::kDevice;
    return result;
  }
  const auto values = gradients_of(item);
  const bool is_plain = are_plain_cpu(values);
  if (is_plain && lie_alike(values, slice.value)) {
    return result;
  }
  if (is_plain && item.step->rule.id != RuleSpec::Id::kLamb) {
    result.way = Ready::Way::kStrided;
    return result;
  }
  const auto dtype = accumulation_type(values, slice.value.scalar_type());
  result.total = sum_of(values, slice, dtype, order);
  return result;
}

// Makes the state and the sums of all items before any of them moves: where
// memory runs out, nothing has changed.
std::vector<CommAten::Ready> CommAten::prepare(
    c10::ArrayRef<Item> items,
    StreamOrder& order) {
  std::vector<Ready> result;
  std::vector<at::Tensor*> made;
  result.reserve(items.size());
  try {
    for (const auto& item : items) {
      if (item.step == nullptr) {
        continue;
      }
      Slice& slice = item.entry->slices[0];
      order.enter(slice);
      result.push_back(ready(item, order));
      RuleStep& step = result.back().step;
      step.is_first = false;
      if (lacks_state(slice, step.rule)) {
        step.is_first = !prepare_state(slice, step.rule, made);
      }
    }
  } catch (...) {
    for (auto* tensor : made) {
      tensor->reset();
    }
    throw;
  }
  return result;
}

// Adds one step to the work, or carries it out.
void CommAten::step_into(
    const Item& item,
    const Ready& ready,
    Work& work,
    StreamOrder& order) {
  Slice& slice = item.entry->slices[0];
  if (slice.value.numel() == 0) {
    return;
  }
  const RuleStep& step = ready.step;
  kernels::cpu::State state{slice.master, {}};
  const auto names = state_names(step.rule);
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr) {
      state.states[i] = slice.states[i];
    }
  }
  if (ready.total.defined()) {
    work.sums.add(
        Value{Value::Form::kDense, &ready.total},
        slice.value,
        ready.total.scalar_type(),
        step,
        state);
    return;
  }
  const auto values = gradients_of(item);
  const auto dtype = accumulation_type(values, slice.value.scalar_type());
  switch (ready.way) {
    case Ready::Way::kBatch:
      work.sums.add(values, slice.value, dtype, step, state);
      break;
    case Ready::Way::kStrided:
      kernels::cpu::sum_strided(values, slice.value, dtype, step, state);
      break;
    case Ready::Way::kDevice: {
      if (work.cuda_sums.add(values, slice.value, dtype, step, state)) {
        break;
      }
      at::Tensor total = sum_of(values, slice, dtype, order);
      const PlainDispatch plain;
      const bool has_master = slice.master.defined();
      step_with_aten(
          step, total, has_master ? slice.master : slice.value, state.states);
      if (has_master) {
        runtime_.copy(slice.value, slice.master);
      }
      break;
    }
  }
}

void CommAten::reduce_update(c10::ArrayRef<Item> items) {
  StreamOrder order(runtime_, events_);
  Work work(*this, order);
  const std::vector<Ready> steps = prepare(items, order);
  const Ready* next = steps.data();
  for (const auto& item : items) {
    Slice& slice = item.entry->slices[0];
    order.enter(slice);
    if (item.step == nullptr) {
      slice.master.reset(); // of an optimizer set meanwhile
      reduce_into(item.values, slice.value, work);
    } else {
      step_into(item, *next++, work, order);
    }
  }
  work.run();
}

void CommAten::accumulate(c10::ArrayRef<Item> items) {
  StreamOrder order(runtime_, events_);
  Work work(*this, order);
  for (const auto& item : items) {
    Slice& slice = item.entry->slices[0];
    order.enter(slice);
    const auto values = gradients_of(item);
    if (!slice.accumulated.defined()) {
      slice.accumulated =
          allocate_state(slice, at::toOpMathType(slice.value.scalar_type()));
    }
    reduce_into(values, slice.accumulated, work);
  }
  work.run();
}

double CommAten::squared_norm(c10::ArrayRef<Item> items) {
  StreamOrder order(runtime_, events_);
  kernels::cpu::SumBatch batch;
  std::vector<at::Tensor> totals; // until the batch has run
  totals.reserve(items.size());
  double elsewhere = 0;
  for (const auto& item : items) {
    Slice& slice = item.entry->slices[0];
    order.enter(slice);
    if (slice.value.numel() == 0) {
      continue;
    }
    const auto values = gradients_of(item);
    const auto dtype = accumulation_type(values, slice.value.scalar_type());
    if (slice.home.is_cpu() && are_plain_cpu(values) &&
        lie_alike(values, slice.value)) {
      batch.add(values, slice.value, dtype, *item.step);
      continue;
    }
    at::Tensor total = sum_of(values, slice, dtype, order);
    if (slice.home.is_cpu()) {
      totals.push_back(std::move(total));
      batch.add(
          Value{Value::Form::kDense, &totals.back()},
          slice.value,
          dtype,
          *item.step);
    } else {
      const PlainDispatch plain;
      elsewhere += squared_norm_with_aten(
          *item.step, total.to(at::toOpMathType(slice.value.scalar_type())));
    }
  }
  return elsewhere + batch.squared_norm();
}

at::Tensor& CommAten::merge_buffer(Slice& slice) {
  if (!slice.merge_buffer.defined()) {
    slice.merge_buffer =
        allocate(slice.value, slice.home, /*for_the_store=*/true);
  }
  return slice.merge_buffer;
}

void CommAten::reduce(const Item& item, Update update) {
  Slice& slice = item.entry->slices[0];
  StreamOrder order(runtime_, events_);
  order.enter(slice);
  slice.master.reset(); // of an optimizer set meanwhile
  Work work(*this, order);
  reduce_into(item.values, merge_buffer(slice), work);
  work.run();
  update(slice.merge_buffer, slice.value);
}

at::Tensor CommAten::empty_like(const Entry& entry) {
  const Slice& slice = entry.slices[0];
  return allocate(slice.value, slice.home, /*for_the_store=*/false);
}

void CommAten::copy_out(c10::ArrayRef<Item> items) {
  // Outs that share memory are written one after another: the last one counts.
  const bool one_by_one = may_overlap(items);
  StreamOrder order(runtime_, events_);
  kernels::cpu::CopyBatch batch;
  CudaBatch cuda_batch(runtime_, order, peers_);
  for (const auto& item : items) {
    Slice& slice = item.entry->slices[0];
    order.enter(slice);
    for (const auto& out : item.outs) {
      if (!one_by_one && is_plain_copy(slice.value, out)) {
        batch.add(slice.value, out);
      } else if (one_by_one || !cuda_batch.add_copy(slice.value, out)) {
        copy(slice.value, out);
      }
      bump_version(out);
    }
  }
  batch.run();
  cuda_batch.run();
}

} // namespace torchkv

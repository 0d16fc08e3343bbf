// Comm for every device that PyTorch knows. Which tensors can go through the
// raw CPU kernels is decided here; the arithmetic is in kernels/.
#include "comm_aten.h"

#include <ATen/Functions.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <vector>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../kernels/cpu/sum.h"
#include "../memory/accumulation_type.h"
#include "../memory/layout.h"
#include "../memory/outs.h"
#include "cuda_batch.h"
#include "step_with_aten.h"

namespace torchkv {
namespace {

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

// The values of a part, after what its slice has accumulated.
class Gradients {
 public:
  explicit Gradients(const Part& part) : all_(part.values) {
    if (part.entry->num_accumulated != 0) {
      copy_.push_back({Value::Form::kDense, &part.slice->accumulated});
      copy_.append(part.values.begin(), part.values.end());
      all_ = copy_;
    }
  }
  Gradients(const Gradients&) = delete; // it may point into itself
  Gradients& operator=(const Gradients&) = delete;
  Gradients(Gradients&&) = delete;
  Gradients& operator=(Gradients&&) = delete;
  ~Gradients() = default;

  operator c10::ArrayRef<Value>() const { // NOLINT(google-explicit-constructor)
    return all_;
  }

 private:
  c10::ArrayRef<Value> all_;
  c10::SmallVector<Value, 4> copy_;
};

} // namespace

// Sums and copies that are carried out together.
struct CommAten::Work {
  Work(CommAten& comm, StreamOrder& order_)
      : order(order_), cuda_sums(comm.runtime_, order_) {}

  void run() {
    sums.run();
    cuda_sums.run();
  }

  StreamOrder& order;
  kernels::cpu::SumBatch sums;
  CudaBatch cuda_sums;
};

at::Tensor CommAten::sum_of(
    c10::ArrayRef<Value> values,
    const Slice& slice,
    c10::ScalarType dtype,
    StreamOrder& order) {
  at::Tensor total = runtime_.allocate(
      slice.value.sizes(), slice.value.strides(), dtype, slice.home.device);
  Work work(*this, order);
  reduce_into(values, total, slice.home, work);
  work.run();
  return total;
}

// Adds the sum to the work, or carries it out.
void CommAten::reduce_into(
    c10::ArrayRef<Value> values,
    const at::Tensor& result,
    const Place& home,
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
  if (work.cuda_sums.add(values, result, home, dtype)) {
    return;
  }
  for (const auto& value : values) {
    work.order.use(home, value.data->device());
  }
  work.order.sync();
  if (values.size() == 1) {
    runtime_.copy(result, *values[0].data);
    return;
  }
  const auto copied = [&](const Value& value) {
    at::Tensor copy = runtime_.allocate(
        result.sizes(), result.strides(), dtype, result.device());
    runtime_.copy(copy, *value.data);
    return copy;
  };
  const at::Tensor total = copied(values[0]);
  for (const auto& value : values.slice(1)) {
    const at::Tensor& data = *value.data;
    const bool is_here = data.device() == result.device() &&
        data.scalar_type() == dtype && is_plain(data);
    const PlainDispatch plain;
    total.add_(is_here ? data : copied(value));
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

CommAten::Ready CommAten::ready(const Part& part, StreamOrder& order) {
  const Slice& slice = *part.slice;
  Ready result;
  result.step = *part.step;
  if (!slice.home.device.is_cpu()) {
    // Before there is state: a capture in which a device does not take part is
    // refused here.
    for (const auto& value : part.values) {
      order.use(slice.home, value.data->device());
    }
    result.way = Ready::Way::kDevice;
    return result;
  }
  const Gradients values(part);
  const bool is_plain = are_plain_cpu(values);
  if (is_plain && lie_alike(values, slice.value)) {
    return result;
  }
  if (is_plain && is_elementwise(part.step->rule)) {
    result.way = Ready::Way::kStrided;
    return result;
  }
  const auto dtype = accumulation_type(values, slice.value.scalar_type());
  result.total = sum_of(values, slice, dtype, order);
  return result;
}

// Makes the state and the sums of all parts before any of them moves: where
// memory runs out, nothing has changed.
std::vector<CommAten::Ready> CommAten::prepare(
    Parts& parts,
    StreamOrder& order) {
  std::vector<Ready> result;
  std::vector<at::Tensor*> made;
  result.reserve(parts.size());
  try {
    for (const auto& part : parts) {
      if (part.step == nullptr) {
        continue;
      }
      Slice& slice = *part.slice;
      order.enter(slice);
      result.push_back(ready(part, order));
      RuleStep& step = result.back().step;
      step.is_first = false;
      if (lacks_state(slice, step.rule)) {
        step.is_first = !slices_.prepare_state(slice, step.rule, made);
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
    const Part& part,
    const Ready& ready,
    Work& work,
    StreamOrder& order) {
  const Slice& slice = *part.slice;
  if (slice.value.numel() == 0) {
    return;
  }
  const RuleStep& step = ready.step;
  const Gradients values(part);
  const auto dtype = accumulation_type(values, slice.value.scalar_type());
  if (ready.way == Ready::Way::kDevice &&
      work.cuda_sums.add(
          values, slice.value, slice.home, dtype, step, &slice)) {
    return;
  }
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
  switch (ready.way) {
    case Ready::Way::kBatch:
      work.sums.add(values, slice.value, dtype, step, state);
      break;
    case Ready::Way::kStrided:
      kernels::cpu::sum_strided(values, slice.value, dtype, step, state);
      break;
    case Ready::Way::kDevice: {
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

void CommAten::gather_for(c10::ArrayRef<Item> items) {
  for (const auto& item : items) {
    if (item.step != nullptr && !is_elementwise(item.step->rule)) {
      slices_.gather(*item.entry);
    }
  }
}

void CommAten::reduce_update(c10::ArrayRef<Item> items) {
  gather_for(items);
  Parts parts(runtime_, items);
  reduce_update(parts);
}

void CommAten::reduce_update(Parts& parts) {
  StreamOrder order = make_order();
  Work work(*this, order);
  const std::vector<Ready> steps = prepare(parts, order);
  const Ready* next = steps.data();
  for (const auto& part : parts) {
    Slice& slice = *part.slice;
    order.enter(slice);
    if (part.step == nullptr) {
      slice.master.reset(); // of an optimizer set meanwhile
      reduce_into(part.values, slice.value, slice.home, work);
    } else {
      step_into(part, *next++, work, order);
    }
  }
  work.run();
}

void CommAten::accumulate(c10::ArrayRef<Item> items) {
  Parts parts(runtime_, items);
  accumulate(parts);
}

void CommAten::accumulate(Parts& parts) {
  StreamOrder order = make_order();
  Work work(*this, order);
  for (const auto& part : parts) {
    Slice& slice = *part.slice;
    order.enter(slice);
    const Gradients values(part);
    reduce_into(values, slices_.accumulated(slice), slice.home, work);
  }
  work.run();
}

double CommAten::squared_norm(c10::ArrayRef<Item> items, double scale) {
  Parts parts(runtime_, items);
  return squared_norm(parts, scale);
}

double CommAten::squared_norm(Parts& parts, double scale) {
  std::vector<at::Tensor> totals; // until the batch has run
  StreamOrder order = make_order();
  kernels::cpu::SumBatch batch;
  CudaBatch cuda_batch(runtime_, order);
  totals.reserve(parts.size());
  // By home, what its device has added up without kernels.
  std::vector<std::pair<Place, at::Tensor>> elsewhere;
  for (const auto& part : parts) {
    Slice& slice = *part.slice;
    order.enter(slice);
    if (slice.value.numel() == 0) {
      continue;
    }
    const Place& home = slice.home;
    const Gradients values(part);
    const auto dtype = accumulation_type(values, slice.value.scalar_type());
    const bool is_cpu = home.device.is_cpu();
    if (is_cpu && are_plain_cpu(values) && lie_alike(values, slice.value)) {
      batch.add(values, slice.value, dtype, *part.step);
      continue;
    }
    if (cuda_batch.add_norm(values, slice.value, home, dtype, *part.step)) {
      continue;
    }
    at::Tensor total = sum_of(values, slice, dtype, order);
    if (is_cpu) {
      totals.push_back(std::move(total));
      batch.add(
          Value{Value::Form::kDense, &totals.back()},
          slice.value,
          dtype,
          *part.step);
      continue;
    }
    const PlainDispatch plain;
    const at::Tensor squared = squared_norm_with_aten(
        *part.step,
        total.to(at::toOpMathType(slice.value.scalar_type())),
        scale);
    const auto sum = std::find_if(
        elsewhere.begin(), elsewhere.end(), [&](const auto& candidate) {
          return candidate.first == home;
        });
    if (sum == elsewhere.end()) {
      elsewhere.emplace_back(home, squared);
    } else {
      sum->second.add_(squared);
    }
  }
  double result = batch.squared_norm(scale) + cuda_batch.squared_norm(scale);
  for (const auto& [home, sum] : elsewhere) {
    order.enter(home);
    const PlainDispatch plain;
    result += sum.item<double>();
  }
  return result;
}

void CommAten::reduce(const Item& item, Update update) {
  slices_.gather(*item.entry);
  Slice& slice = item.entry->slices[0];
  StreamOrder order = make_order();
  order.enter(slice);
  slice.master.reset(); // of an optimizer set meanwhile
  Work work(*this, order);
  reduce_into(item.values, slices_.merge_buffer(slice), slice.home, work);
  work.run();
  update(slice.merge_buffer, slice.value);
}

void CommAten::copy_out(c10::ArrayRef<Item> items) {
  if (!may_overlap(items)) {
    Parts parts(runtime_, items);
    copy_out(parts);
  } else {
    // One after another: the last one counts.
    for (Item item : items) {
      for (const auto& out : item.outs) {
        item.outs = out;
        Parts parts(runtime_, item);
        copy_out(parts);
      }
    }
  }
  bump_versions(items);
}

void CommAten::copy_out(Parts& parts) {
  for (const auto& whole : parts.whole_outs()) {
    const at::Tensor& out = *whole.out;
    slices_.copy(out, slices_.copy_of(*whole.entry, out.device()));
  }
  StreamOrder order = make_order();
  kernels::cpu::CopyBatch batch;
  CudaBatch cuda_batch(runtime_, order);
  for (const auto& part : parts) {
    Slice& slice = *part.slice;
    order.enter(slice);
    for (const auto& out : part.outs) {
      if (is_plain_cpu_copy(slice.value, out)) {
        batch.add(slice.value, out);
      } else if (!cuda_batch.add_copy(slice.value, slice.home, out)) {
        order.use(slice.home, out.device());
        order.sync();
        runtime_.copy(out, slice.value);
      }
    }
  }
  batch.run();
  cuda_batch.run();
}

} // namespace torchkv

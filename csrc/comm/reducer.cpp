#include "reducer.h"

#include <ATen/OpMathType.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "../core/promote.h"
#include "../memory/layout.h"

namespace torchkv {
namespace {

// Whether state that the rule needs does not exist yet.
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
      copy_.push_back(Value(&part.slice->accumulated));
      copy_.append(part.values.begin(), part.values.end());
      all_ = copy_;
    }
  }
  Gradients(const Gradients&) = delete; // it may point into itself
  Gradients& operator=(const Gradients&) = delete;

  operator c10::ArrayRef<Value>() const { // NOLINT(google-explicit-constructor)
    return all_;
  }

 private:
  c10::ArrayRef<Value> all_;
  c10::SmallVector<Value, 4> copy_;
};

// The dtype in which values are summed for a stored value of dtype `stored`:
// at::toOpMathType of the promotion of them all; fp8 counts as fp32.
c10::ScalarType accumulation_type(
    c10::ArrayRef<Value> values,
    c10::ScalarType stored) {
  c10::ScalarType dtype = promotable(stored);
  for (const auto& value : values) {
    dtype = promoted(dtype, value.dtype());
  }
  return at::toOpMathType(dtype);
}

Job job_of(
    const Part& part,
    c10::ArrayRef<Value> values,
    const at::Tensor& result,
    const RuleStep& step = kAssignStep) {
  return {
      part.entry,
      part.slice,
      values,
      &result,
      accumulation_type(values, result.scalar_type()),
      &step};
}

// Whether the memory extents of two outs overlap. Outs are then written in
// order, and the last one wins.
bool may_overlap(c10::ArrayRef<Item> items) {
  c10::SmallVector<Span, 4> spans;
  bool ascending = true;
  spans.reserve(items.size());
  for (const auto& item : items) {
    for (const auto& out : item.outs) {
      spans.push_back(span_of(out));
      const size_t n = spans.size();
      ascending =
          ascending && (n == 1 || spans[n - 2].end <= spans[n - 1].begin);
    }
  }
  if (ascending) {
    return false;
  }
  std::sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) {
    return a.begin < b.begin;
  });
  const auto* overlap = std::adjacent_find(
      spans.begin(), spans.end(), [](const auto& a, const auto& b) {
        return a.end > b.begin;
      });
  return overlap != spans.end();
}

bool has_outs(const Item& item) {
  return !item.outs.empty();
}

// Whether the pass that makes the stored value can write its outs.
bool can_write_outs(const Item& item) {
  const auto& slices = item.entry->slices;
  return slices.size() == 1 &&
      std::all_of(item.outs.begin(), item.outs.end(), [&](const auto& out) {
           return is_plain_cpu_copy(slices[0].value, out);
         });
}

// Bumps the version counters of a call's outs, which are written below
// autograd, so that an autograd graph that saved one reports the change.
void bump_versions(c10::ArrayRef<Item> items) {
  for (const auto& item : items) {
    for (const auto& out : item.outs) {
      if (!out.is_inference()) {
        out.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

} // namespace

// A call's parts, ordered on their devices, and what processes them. Parts that
// the collective can sum have been summed.
struct Reducer::Call {
  Call(const Reducer& reducer, c10::ArrayRef<Item> items)
      : parts(reducer.streams_.runtime, items),
        order(reducer.streams_),
        backends(order) {
    if (reducer.collective_ != nullptr) {
      reducer.collective_->reduce(parts);
    }
  }

  Parts parts;
  StreamOrder order;
  Backends backends;
};

// Creates the state of all parts, and returns the steps in the order of the
// parts.
std::vector<RuleStep> Reducer::prepare(
    Call& call,
    std::vector<at::Tensor*>& made) {
  std::vector<RuleStep> steps;
  steps.reserve(call.parts.size());
  for (const auto& part : call.parts) {
    if (part.step == nullptr) {
      continue;
    }
    Slice& slice = *part.slice;
    slice.enter(call.order);
    // Else the pass that steps a shared value does so itself.
    const bool follows = part.entry->is_master_loaded ||
        (part.entry->is_shared && !is_elementwise(part.step->rule));
    if (follows && slice.master.defined()) {
      Slices::follow_writes(slice);
    }
    // Before there is state: a capture that does not include all devices is
    // refused here.
    for (const auto& value : part.values) {
      call.order.use(slice.home, value.device());
    }
    RuleStep& step = steps.emplace_back(*part.step);
    if (is_random(step.rule)) { // other steps stay the same, to share a launch
      step.stream += num_numbers(
          part.entry->offset + slice.begin, slice.value.scalar_type());
    }
    step.is_first = lacks_state(slice, step.rule) &&
        !slices_.prepare_state(slice, step.rule, made);
  }
  return steps;
}

Reducer::Items Reducer::update(c10::ArrayRef<Item> given) {
  Items with_outs; // that are written in the pass
  Items copied; // the others
  c10::ArrayRef<Item> items = given;
  if (std::any_of(given.begin(), given.end(), has_outs)) {
    for (Item item : given) {
      if (!can_write_outs(item)) {
        copied.push_back(item);
        item.outs = {};
      }
      with_outs.push_back(item);
    }
    items = with_outs;
  }
  for (const auto& item : items) {
    if (item.step != nullptr && !is_elementwise(item.step->rule)) {
      placement_.gather(*item.entry);
    }
  }
  Call call(*this, items);
  std::vector<RuleStep> steps;
  std::vector<at::Tensor*> made;
  try {
    steps = prepare(call, made);
    const RuleStep* step = steps.data();
    for (const auto& part : call.parts) {
      Slice& slice = *part.slice;
      slice.enter(call.order);
      if (part.step == nullptr) {
        slice.master.reset(); // of an optimizer set meanwhile
        Job job = job_of(part, part.values, slice.value);
        job.outs = part.outs;
        call.backends.add(job);
      } else {
        const Gradients gradients(part);
        Job job = job_of(part, gradients, slice.value, *step++);
        job.outs = part.outs;
        call.backends.add(job);
      }
    }
  } catch (...) {
    // No value has changed yet, so neither has any state.
    for (auto* tensor : made) {
      tensor->reset();
    }
    throw;
  }
  call.backends.run();
  for (const auto& item : items) {
    Slices::note_written(*item.entry);
    item.entry->is_master_loaded = false;
  }
  bump_versions(items);
  return copied;
}

void Reducer::accumulate(c10::ArrayRef<Item> items) {
  Call call(*this, items);
  for (const auto& part : call.parts) {
    part.slice->enter(call.order);
    call.backends.add(
        job_of(part, Gradients(part), slices_.accumulated(*part.slice)));
  }
  call.backends.run();
}

double Reducer::squared_norm(c10::ArrayRef<Item> items, double scale) {
  Call call(*this, items);
  for (const auto& part : call.parts) {
    part.slice->enter(call.order);
    const Gradients gradients(part);
    Job job = job_of(part, gradients, part.slice->value, *part.step);
    job.is_norm = true;
    call.backends.add(job);
  }
  return call.backends.squared_norm(scale);
}

void Reducer::reduce(const Item& item, Update update) {
  placement_.gather(*item.entry);
  Call call(*this, item);
  const Part& part = *call.parts.begin();
  Slice& slice = *part.slice;
  slice.enter(call.order);
  slice.master.reset(); // of an optimizer set meanwhile
  call.backends.add(job_of(part, part.values, slices_.merge_buffer(slice)));
  call.backends.run();
  update(slice.merge_buffer, slice.value);
  Slices::note_written(*item.entry);
}

void Reducer::sum_rows(const Item& item, int64_t num_rows, Update update) {
  placement_.gather(*item.entry);
  Call call(*this, item);
  const Part& part = *call.parts.begin();
  Slice& slice = *part.slice;
  slice.enter(call.order);
  slice.master.reset(); // of an optimizer set meanwhile
  c10::SmallVector<int64_t, 4> sizes(item.entry->meta.sizes);
  sizes[0] = num_rows;
  at::Tensor sum = streams_.runtime.allocate(
      sizes,
      at::detail::defaultStrides(sizes),
      item.entry->meta.dtype,
      slice.home.device);
  call.backends.add(job_of(part, part.values, sum));
  call.backends.run();
  update(sum, slice.value);
}

void Reducer::copy_out(c10::ArrayRef<Item> items) {
  if (!may_overlap(items)) {
    Parts parts(streams_.runtime, items);
    if (collective_ != nullptr) {
      collective_->broadcast(parts);
    }
    copy_parts(parts);
  } else {
    // In order: the last one wins.
    for (Item item : items) {
      for (const auto& out : item.outs) {
        item.outs = out;
        Parts parts(streams_.runtime, item);
        copy_parts(parts);
      }
    }
  }
  bump_versions(items);
}

void Reducer::copy_parts(Parts& parts) {
  for (const auto& whole : parts.whole_outs()) {
    const at::Tensor& out = *whole.out;
    slices_.copy(out, slices_.copy_of(*whole.entry, out.device()));
  }
  StreamOrder order(streams_);
  Backends backends(order);
  for (const auto& part : parts) {
    part.slice->enter(order);
    for (const auto& out : part.outs) {
      backends.add_copy(*part.slice, out);
    }
  }
  backends.run();
}

} // namespace torchkv

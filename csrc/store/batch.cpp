#include "batch.h"

namespace torchkv {

Batch::Batch(const Groups& groups, size_t begin, size_t end) {
  const Tensors& values = groups.tensors();
  const int64_t first = values.begin(static_cast<int64_t>(begin));
  items.reserve(end - begin);
  values_.reserve(values.ends[end - 1] - first); // items point to them
  for (size_t i = begin; i < end; ++i) {
    const size_t own = values_.size();
    for (int64_t j = values.begin(static_cast<int64_t>(i)); j < values.ends[i];
         ++j) {
      values_.push_back(values.value(j));
    }
    items.push_back(
        {groups.entries()[i].get(),
         c10::ArrayRef<Value>(values_).slice(own),
         {},
         nullptr});
  }
}

void Batch::plan(
    const Optimizer& optimizer,
    c10::function_ref<OptimizerPtr()> current,
    Slices& slices) {
  OptimizerPtr newer;
  steps.reserve(items.size()); // items point to them
  stepping.reserve(items.size());
  for (Item item : items) {
    Entry& entry = *item.entry;
    const Optimizer* own = &optimizer;
    if (entry.generation > optimizer.generation) {
      newer = newer == nullptr ? current() : newer;
      own = newer == nullptr ? own : newer.get();
    }
    if (entry.generation != own->generation) {
      slices.clear_state(entry);
      entry.generation = own->generation;
    }
    const GradientSpec& gradient = own->gradient;
    RuleStep step;
    step.rule = own->rule_of(entry.key);
    step.step = entry.step + 1;
    step.scale = gradient.rescale_grad;
    step.clip_value = gradient.clip_value;
    steps.push_back(step);
    item.step = &steps.back();
    const bool steps_now = entry.num_accumulated + 1 >= gradient.accumulate;
    (steps_now ? stepping : accumulating).push_back(item);
  }
}

} // namespace torchkv

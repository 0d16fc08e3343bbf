#include "batch.h"

namespace torchkv {

Batch::Batch(
    Comm& comm,
    const Entries& entries,
    const Tensors& values,
    size_t begin,
    size_t end,
    bool may_cut)
    : comm_(comm) {
  items.reserve(end - begin);
  values_.reserve(values.flat.size());
  for (size_t i = begin; i < end; ++i) {
    for (const auto& tensor : values.of(static_cast<int64_t>(i))) {
      values_.push_back({Value::Form::kDense, &tensor});
    }
  }
  const Value* next = values_.begin();
  for (size_t i = begin; i < end; ++i) {
    const size_t num_values = values.of(static_cast<int64_t>(i)).size();
    items.push_back({entries[i].get(), {next, num_values}, {}, nullptr});
    next += num_values;
  }
  comm.place(items, may_cut);
}

void Batch::plan(
    const Optimizer& optimizer,
    c10::function_ref<OptimizerPtr()> current) {
  OptimizerPtr newer;
  steps.reserve(items.size()); // items point to them
  stepping.reserve(items.size());
  for (Item item : items) {
    Entry& entry = *item.entry;
    const Optimizer* own = &optimizer;
    if (entry.optimizer > optimizer.identity) {
      newer = newer == nullptr ? current() : newer;
      own = newer == nullptr ? own : newer.get();
    }
    if (entry.optimizer != own->identity) {
      comm_.clear_state(entry);
      entry.optimizer = own->identity;
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

#include "optimizer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "../core/errors.h"
#include "../core/random_stream.h"
#include "../core/step_rate.h"
#include "../core/text.h"

namespace torchkv {

namespace {

constexpr auto* kBeginNumUpdate = "begin_num_update";

bool is_shared(const std::string& name) {
  return name == kBeginNumUpdate || is_of_schedule(name) ||
      numbers_of(GradientSpec()).count(name) != 0;
}

// LBSGD counts the pushes that it sums to a step.
double updates_per_step(const RuleSpec& rule) {
  return rule.id == RuleSpec::Id::kMxnetLbsgd ? rule.alpha : 1;
}

} // namespace

GradientSpec make_gradient(const char* op, const NumbersByName& numbers) {
  GradientSpec gradient;
  for (const auto& [name, value] : numbers) {
    if (name == "accumulate") {
      gradient.accumulate = whole_number(op, name, value, 1);
    } else if (name == "rescale_grad") {
      gradient.rescale_grad = value;
    } else if (name == "clip_value") {
      gradient.clip_value = value;
    } else if (name == "max_norm") {
      gradient.max_norm = value;
    } else if (name == "skip_nonfinite") {
      gradient.skip_nonfinite = value != 0;
    } else if (name == "lazy") {
      gradient.lazy = value != 0;
    } else {
      TORCH_CHECK_VALUE(
          false,
          op,
          ": unknown gradient option ",
          quoted(name),
          "; expected accumulate, rescale_grad, clip_value, max_norm, "
          "skip_nonfinite or lazy");
    }
  }
  return gradient;
}

NumbersByName numbers_of(const GradientSpec& gradient) {
  return {
      {"accumulate", static_cast<double>(gradient.accumulate)},
      {"rescale_grad", gradient.rescale_grad},
      {"clip_value", gradient.clip_value},
      {"max_norm", gradient.max_norm},
      {"skip_nonfinite", gradient.skip_nonfinite ? 1 : 0},
      {"lazy", gradient.lazy ? 1 : 0}};
}

void set_shared_numbers(
    const char* op,
    Optimizer& optimizer,
    const NumbersByName& numbers) {
  NumbersByName gradient;
  NumbersByName schedule;
  int64_t begin = 0;
  for (const auto& [name, value] : numbers) {
    if (name == kBeginNumUpdate) {
      begin = whole_number(op, name, value, 0);
    } else {
      (is_of_schedule(name) ? schedule : gradient)[name] = value;
    }
  }
  optimizer.schedule = make_schedule(op, schedule);
  optimizer.gradient = make_gradient(op, gradient);
  optimizer.begin_num_update = begin;
}

NumbersByName shared_numbers(const Optimizer& optimizer) {
  NumbersByName numbers = numbers_of(optimizer.gradient);
  numbers.merge(numbers_of(optimizer.schedule));
  if (optimizer.begin_num_update != 0) {
    numbers[kBeginNumUpdate] = static_cast<double>(optimizer.begin_num_update);
  }
  return numbers;
}

Optimizer make_optimizer(
    const char* op,
    const std::string& name,
    const NumbersByName& numbers) {
  NumbersByName shared;
  NumbersByName rule;
  for (const auto& [number_name, value] : numbers) {
    (is_shared(number_name) ? shared : rule)[number_name] = value;
  }
  Optimizer optimizer;
  optimizer.groups.push_back(make_rule(op, name, rule));
  set_shared_numbers(op, optimizer, shared);
  return optimizer;
}

RuleSpec Optimizer::rule_of(const Key& key) const {
  const auto it = keys.find(key);
  if (it == keys.end()) {
    return groups[0];
  }
  const KeyOptions& options = it->second;
  RuleSpec rule = groups[options.group];
  rule.lr *= options.lr_mult;
  rule.weight_decay *= options.wd_mult;
  return rule;
}

void Optimizer::set_step(RuleStep& step, const Key& key, int64_t num_steps)
    const {
  step.rule = rule_of(key);
  // LBSGD's warm-up counts from 0, and it looks its rate up before it counts.
  const bool is_lbsgd = step.rule.id == RuleSpec::Id::kMxnetLbsgd;
  step.step = num_steps + 1 + (is_lbsgd ? 0 : begin_num_update);
  if (schedule.kind != Schedule::Kind::kNone) {
    const auto it = keys.find(key);
    step.rule.lr =
        schedule.rate(num_updates(num_steps + 1) - (is_lbsgd ? 1 : 0)) *
        (it == keys.end() ? 1 : it->second.lr_mult);
  }
  switch (step.rule.id) {
    case RuleSpec::Id::kMxnetLbsgd:
      step.last_scale = 1 / step.rule.alpha; // the mean of batch_scale pushes
      step = without_norms(step);
      break;
    case RuleSpec::Id::kMxnetLars:
      step = without_norms(step);
      break;
    case RuleSpec::Id::kMxnetSgld:
      step.stream = random_stream(
          static_cast<uint64_t>(step.rule.extra1),
          key,
          {static_cast<uint64_t>(num_steps)});
      break;
    default:
      break;
  }
}

bool Optimizer::is_elementwise() const {
  return std::all_of(groups.begin(), groups.end(), [](const RuleSpec& rule) {
    return torchkv::is_elementwise(rule);
  });
}

int64_t Optimizer::num_updates(int64_t num_steps) const {
  // In fp64, where no batch_scale overflows.
  const double most = 0x1p53 - static_cast<double>(begin_num_update);
  const double own =
      static_cast<double>(num_steps) * updates_per_step(groups[0]);
  return begin_num_update + static_cast<int64_t>(std::min(own, most));
}

void check_optimizer(const char* op, const Optimizer& optimizer) {
  TORCH_CHECK_VALUE(
      !optimizer.groups.empty(),
      op,
      ": expected at least one parameter group, but got none");
  for (const auto& rule : optimizer.groups) {
    check_rule(op, rule);
    TORCHKV_INTERNAL_ASSERT(
        rule.id != RuleSpec::Id::kAssign && rule.id == optimizer.groups[0].id);
  }
  const auto check = [&](const char* name, double value, double least) {
    TORCH_CHECK_VALUE(
        is_finite_float(value) && value >= least,
        op,
        ": expected a ",
        name,
        " of at least ",
        least,
        " that is finite in fp32, but got ",
        value);
  };
  const GradientSpec& gradient = optimizer.gradient;
  check("accumulate", static_cast<double>(gradient.accumulate), 1);
  check("rescale_grad", gradient.rescale_grad, -HUGE_VAL);
  check("clip_value", gradient.clip_value, 0);
  check("max_norm", gradient.max_norm, 0);
  TORCH_CHECK_VALUE(
      gradient.clip_value == 0 || static_cast<float>(gradient.clip_value) != 0,
      op,
      ": expected a clip_value that is not 0 in fp32, or 0 for no clipping, but "
      "got ",
      gradient.clip_value);
  for (const auto& [key, options] : optimizer.keys) {
    const Where where{op, key};
    TORCHKV_CHECK_VALUE(
        options.group < optimizer.groups.size(),
        where,
        "expected a group less than ",
        optimizer.groups.size(),
        ", but got ",
        options.group);
    const RuleSpec rule = optimizer.rule_of(key);
    TORCHKV_CHECK_VALUE(
        options.lr_mult >= 0 && is_finite_float(rule.lr) &&
            is_finite_float(
                optimizer.schedule.largest_rate() * options.lr_mult) &&
            options.wd_mult >= 0 && is_finite_float(rule.weight_decay),
        where,
        "expected multipliers of at least 0 that leave lr and weight_decay "
        "finite in fp32, but got ",
        options.lr_mult,
        " and ",
        options.wd_mult);
  }
}

uint64_t new_generation() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

} // namespace torchkv

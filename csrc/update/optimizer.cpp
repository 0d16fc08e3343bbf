#include "optimizer.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cmath>

#include "../core/errors.h"
#include "../core/text.h"

namespace torchkv {

GradientSpec make_gradient(const char* op, const NumbersByName& numbers) {
  GradientSpec gradient;
  for (const auto& [name, value] : numbers) {
    if (name == "accumulate") {
      constexpr double kMost = 9007199254740992; // 2^53: exact in a double
      TORCH_CHECK_VALUE(
          value >= 1 && value <= kMost && value == std::floor(value),
          op,
          ": expected accumulate to be a whole number of at least 1, but got ",
          value);
      gradient.accumulate = static_cast<int64_t>(value);
    } else if (name == "rescale_grad") {
      gradient.rescale_grad = value;
    } else if (name == "clip_value") {
      gradient.clip_value = value;
    } else if (name == "max_norm") {
      gradient.max_norm = value;
    } else if (name == "skip_nonfinite") {
      gradient.skip_nonfinite = value != 0;
    } else {
      TORCH_CHECK_VALUE(
          false,
          op,
          ": unknown gradient option ",
          quoted(name),
          "; expected accumulate, rescale_grad, clip_value, max_norm or "
          "skip_nonfinite");
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
      {"skip_nonfinite", gradient.skip_nonfinite ? 1 : 0}};
}

Optimizer make_optimizer(
    const char* op,
    const std::string& name,
    const NumbersByName& numbers) {
  const NumbersByName of_gradient = numbers_of(GradientSpec());
  NumbersByName gradient;
  NumbersByName rule;
  for (const auto& [number_name, value] : numbers) {
    (of_gradient.count(number_name) != 0 ? gradient : rule)[number_name] =
        value;
  }
  Optimizer optimizer;
  optimizer.groups.push_back(make_rule(op, name, rule));
  optimizer.gradient = make_gradient(op, gradient);
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

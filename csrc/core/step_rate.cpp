#include "step_rate.h"

#include <cmath>

namespace torchkv {
namespace {

using RuleId = RuleSpec::Id;

// LARS or LBSGD with this ratio of the norms.
void set_ratio(RuleSpec& rule, double ratio) {
  if (scales_gradient(rule)) {
    // MXNet multiplies its momentum, which contains the learning rate, by the
    // ratio of this step's rate to the last one's. Here it does not contain it.
    rule.extra1 = 0;
    rule.extra2 = ratio;
  } else {
    rule.id = RuleId::kMxnetSgd;
    rule.lr *= ratio;
  }
}

double warmup_factor(const RuleSpec& lbsgd, double num_updates) {
  const double batch_scale = lbsgd.alpha;
  if (num_updates >= lbsgd.extra2) {
    return batch_scale;
  }
  const double part = lbsgd.extra2 <= 1 ? 0 : num_updates / lbsgd.extra2;
  const WarmupStrategy strategy = warmup_strategy(lbsgd);
  return 1 +
      (batch_scale - 1) *
      (strategy == WarmupStrategy::kLinear       ? part
           : strategy == WarmupStrategy::kPower2 ? part * part
                                                 : std::sqrt(part));
}

} // namespace

RuleStep scaled_by_norms(const RuleStep& step, double weight, double gradient) {
  RuleStep result = step;
  set_ratio(result.rule, norm_ratio(step.rule, step.scale, weight, gradient));
  return result;
}

RuleStep without_norms(const RuleStep& step) {
  RuleStep result = step;
  RuleSpec& rule = result.rule;
  if (needs_gradient_norm(rule)) {
    return result;
  }
  if (rule.id == RuleId::kMxnetLars) {
    set_ratio(rule, 1);
  } else if (rule.id == RuleId::kMxnetLbsgd) {
    set_ratio(
        rule,
        warmup_factor(
            rule, rule.lr_decay + static_cast<double>(step.step) * rule.alpha));
  }
  return result;
}

} // namespace torchkv

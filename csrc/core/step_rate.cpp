#include "step_rate.h"

#include <algorithm>
#include <cmath>

namespace torchkv {
namespace {

using RuleId = RuleSpec::Id;

// LARS with this ratio of the norms.
void set_trust(RuleSpec& lars, double trust) {
  if (lars.correction && lars.momentum != 0) {
    // MXNet multiplies its momentum, which contains the learning rate, by the
    // ratio of this step's rate to the last one's. Here it does not contain it.
    lars.extra1 = 0;
    lars.extra2 = trust;
  } else {
    lars.id = RuleId::kMxnetSgd;
    lars.lr *= trust;
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
  RuleSpec& rule = result.rule;
  if (rule.id == RuleId::kMxnetLars) {
    const bool has_ratio = weight > 0 && gradient > 0;
    set_trust(
        rule,
        has_ratio ? rule.extra1 * weight /
                (rule.weight_decay * weight + gradient + rule.eps)
                  : 1);
  } else {
    // Of the gradient that is not rescaled.
    const double decay = std::sqrt(rule.weight_decay) * weight;
    const double own = step.scale == 0 ? 0 : gradient / step.scale;
    const double divisor = std::hypot(decay, own, 1e-9);
    rule.id = RuleId::kMxnetSgd;
    rule.lr *= std::clamp(weight / divisor, 0.01, 100.);
  }
  return result;
}

RuleStep without_norms(const RuleStep& step) {
  RuleStep result = step;
  RuleSpec& rule = result.rule;
  if (needs_gradient_norm(rule)) {
    return result;
  }
  if (rule.id == RuleId::kMxnetLars) {
    set_trust(rule, 1);
  } else if (rule.id == RuleId::kMxnetLbsgd) {
    rule.lr *= warmup_factor(
        rule, rule.lr_decay + static_cast<double>(step.step) * rule.alpha);
    rule.id = RuleId::kMxnetSgd;
  }
  return result;
}

} // namespace torchkv

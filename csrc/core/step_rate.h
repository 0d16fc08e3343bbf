#pragma once

#include <cmath>

#include "export.h"
#include "host_device.h"
#include "rule.h"

// The learning rates of rules that depend on the norms of a whole value. LARS
// and LBSGD are SGD with a learning rate of their own for each step.
namespace torchkv {

// The ratio by which a rule that has_norms() scales a step: from the 2-norms of
// the weight and of the direction of the step (LAMB) or of the gradient as the
// rule sees it, which `scale` has multiplied.
TORCHKV_HOST_DEVICE inline double norm_ratio(
    const RuleSpec& rule,
    double scale,
    double weight,
    double step) {
  switch (rule.id) {
    case RuleSpec::Id::kMxnetLars:
      return weight > 0 && step > 0 ? rule.extra1 * weight /
              (rule.weight_decay * weight + step + rule.eps)
                                    : 1;
    case RuleSpec::Id::kMxnetLbsgd: {
      // Of the gradient that is not rescaled.
      const double own = scale == 0 ? 0 : step / scale;
      const double decay = std::sqrt(rule.weight_decay) * weight;
      const double ratio = weight / std::hypot(std::hypot(decay, own), 1e-9);
      const double at_least = ratio < 0.01 ? 0.01 : ratio;
      return at_least > 100 ? 100 : at_least;
    }
    default: // LAMB, MXNet's with bounds of the weight's norm
      if (rule.id == RuleSpec::Id::kMxnetLamb) {
        const double least = rule.extra1;
        const double most = rule.extra2;
        weight = least > 0 && weight < least ? least : weight; // NaN stays
        weight = most > 0 && weight > most ? most : weight;
      }
      return weight > 0 && step > 0 ? weight / step : 1;
  }
}

// Whether the ratio multiplies the gradient that LARS adds to its momentum,
// which does not contain the learning rate, and not the learning rate.
TORCHKV_HOST_DEVICE inline bool scales_gradient(const RuleSpec& rule) {
  return rule.id == RuleSpec::Id::kMxnetLars && rule.correction &&
      rule.momentum != 0;
}

// The step with the ratio of the norms of the whole weight and of its gradient,
// as the rule sees it: by an elementwise rule.
// REQUIRES: a rule that needs_gradient_norm().
TORCHKV_API RuleStep
scaled_by_norms(const RuleStep& step, double weight, double gradient);

// The step of a rule that may depend on norms, but does not, by a rule that
// cannot; other steps as they are.
TORCHKV_API RuleStep without_norms(const RuleStep& step);

} // namespace torchkv

#pragma once

#include "export.h"
#include "rule.h"

// LARS and LBSGD are SGD with a learning rate of their own for each step.
namespace torchkv {

// The step with the ratio of the norms of the whole weight and of its gradient,
// as the rule sees it: by an elementwise rule.
// REQUIRES: a rule that needs_gradient_norm().
TORCHKV_API RuleStep
scaled_by_norms(const RuleStep& step, double weight, double gradient);

// The step of a rule that may depend on norms, but does not, by a rule that
// cannot; other steps as they are.
TORCHKV_API RuleStep without_norms(const RuleStep& step);

} // namespace torchkv

#pragma once

#include <gtest/gtest.h>

#include "core/mixed_bits.h"
#include "core/normal.h"
#include "kernels/mxnet_rules.h"

namespace torchkv::testing {

// The new value of number i. For LAMB, updates only the state.
template <typename T>
T plain_rule(
    const RuleStep& step,
    const kernels::RuleNumbers<T>& n,
    T w,
    T g,
    T* const* s,
    int64_t i) {
  using namespace kernels; // NOLINT: the formulas
  const RuleSpec& rule = step.rule;
  T none = 0;
  const auto at = [&](size_t k) -> T& {
    return s[k] == nullptr ? none : s[k][i];
  };
  switch (rule.id) {
    case RuleSpec::Id::kSgd:
      return rule.momentum == 0 ? sgd(w, g, n) : sgd_momentum(w, g, at(0), n);
    case RuleSpec::Id::kAdam:
      if (rule.decoupled) {
        return rule.amsgrad ? adam<true, true>(w, g, at(0), at(1), at(2), n)
                            : adam<true, false>(w, g, at(0), at(1), at(2), n);
      }
      return rule.amsgrad ? adam<false, true>(w, g, at(0), at(1), at(2), n)
                          : adam<false, false>(w, g, at(0), at(1), at(2), n);
    case RuleSpec::Id::kAdagrad:
      return adagrad(w, g, at(0), n);
    case RuleSpec::Id::kRmsprop:
      if (rule.centered) {
        return rule.momentum > 0
            ? rmsprop<true, true>(w, g, at(0), at(1), at(2), n)
            : rmsprop<true, false>(w, g, at(0), at(1), at(2), n);
      }
      return rule.momentum > 0
          ? rmsprop<false, true>(w, g, at(0), at(1), at(2), n)
          : rmsprop<false, false>(w, g, at(0), at(1), at(2), n);
    case RuleSpec::Id::kLion:
      return lion(w, g, at(0), n);
    case RuleSpec::Id::kLamb:
      lamb_state(g, at(0), at(1), n);
      return w;
    case RuleSpec::Id::kMxnetSgd:
      return rule.momentum == 0 ? mxnet_sgd(w, g, n)
                                : mxnet_sgd_momentum(w, g, at(0), n);
    case RuleSpec::Id::kMxnetNag:
      return rule.momentum == 0 ? mxnet_sgd(w, g, n)
                                : mxnet_nag_momentum(w, g, at(0), n);
    case RuleSpec::Id::kMxnetSignum:
      return rule.momentum == 0 ? mxnet_signsgd(w, g, n)
                                : mxnet_signum(w, g, at(0), n);
    case RuleSpec::Id::kMxnetAdam:
      return mxnet_adam(w, g, at(0), at(1), n);
    case RuleSpec::Id::kMxnetAdamax:
      return mxnet_adamax(w, g, at(0), at(1), n);
    case RuleSpec::Id::kMxnetNadam:
      return mxnet_nadam(w, g, at(0), at(1), n);
    case RuleSpec::Id::kMxnetAdagrad:
      return mxnet_adagrad(w, g, at(0), n);
    case RuleSpec::Id::kMxnetAdadelta:
      return mxnet_adadelta(w, g, at(0), at(1), n);
    case RuleSpec::Id::kMxnetRmsprop:
      return rule.centered ? mxnet_rmsprop<true>(w, g, at(0), at(1), at(2), n)
                           : mxnet_rmsprop<false>(w, g, at(0), at(1), at(2), n);
    case RuleSpec::Id::kMxnetFtrl:
      return mxnet_ftrl(w, g, at(0), at(1), n);
    case RuleSpec::Id::kMxnetFtml:
      return mxnet_ftml(w, g, at(0), at(1), at(2), n);
    case RuleSpec::Id::kMxnetDcasgd:
      return rule.momentum == 0 ? mxnet_dcasgd<false>(w, g, at(0), at(1), n)
                                : mxnet_dcasgd<true>(w, g, at(0), at(1), n);
    case RuleSpec::Id::kMxnetTest:
      return w + g;
    case RuleSpec::Id::kMxnetLars:
      return mxnet_lars(w, g, at(0), n);
    case RuleSpec::Id::kMxnetSgld: {
      const uint64_t bits = mixed_bits(step.stream + static_cast<uint64_t>(i));
      return mxnet_sgld(w, g, static_cast<T>(normal_number(bits)), n);
    }
    case RuleSpec::Id::kMxnetLamb:
      mxnet_lamb_state(g, at(0), at(1), n);
      return w;
    default:
      ADD_FAILURE();
      return w;
  }
}

} // namespace torchkv::testing

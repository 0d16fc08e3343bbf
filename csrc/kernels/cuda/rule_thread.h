#pragma once

#include "../../core/mixed_bits.h"
#include "../../core/normal.h"
#include "../mxnet_rules.h"
#include "params.h"

// A rule for one element, by a thread of a kernel.
namespace torchkv::kernels::cuda {

// The gradient as the rule sees it before last_scale.
template <typename T>
TORCHKV_HOST_DEVICE inline T clipped(const Step<T>& step, T g) {
  g = g * step.scale;
  g = g > step.limit ? step.limit : g; // propagates NaN
  return g < -step.limit ? -step.limit : g;
}

template <typename T>
TORCHKV_HOST_DEVICE inline T update(
    const Step<T>& step,
    Rule rule,
    T w,
    T g,
    const bool* has,
    T* s,
    int64_t element) {
  g = clipped(step, g) * step.last_scale;
  const RuleNumbers<T>& n = step.numbers;
  if (rule == Rule::kSgd) {
    return has[0] ? sgd_momentum(w, g, s[0], n) : sgd(w, g, n);
  }
  if (rule == Rule::kAdam) {
    if (step.decoupled) {
      return has[2] ? adam<true, true>(w, g, s[0], s[1], s[2], n)
                    : adam<true, false>(w, g, s[0], s[1], s[1], n);
    }
    return has[2] ? adam<false, true>(w, g, s[0], s[1], s[2], n)
                  : adam<false, false>(w, g, s[0], s[1], s[1], n);
  }
  switch (step.id) {
    case RuleSpec::Id::kAdagrad:
      return adagrad(w, g, s[0], n);
    case RuleSpec::Id::kLion:
      return lion(w, g, s[0], n);
    case RuleSpec::Id::kMxnetSgd:
      return has[0] ? mxnet_sgd_momentum(w, g, s[0], n) : mxnet_sgd(w, g, n);
    case RuleSpec::Id::kMxnetNag:
      return has[0] ? mxnet_nag_momentum(w, g, s[0], n) : mxnet_sgd(w, g, n);
    case RuleSpec::Id::kMxnetSignum:
      return has[0] ? mxnet_signum(w, g, s[0], n) : mxnet_signsgd(w, g, n);
    case RuleSpec::Id::kMxnetAdam:
      return mxnet_adam(w, g, s[0], s[1], n);
    case RuleSpec::Id::kMxnetAdamax:
      return mxnet_adamax(w, g, s[0], s[1], n);
    case RuleSpec::Id::kMxnetNadam:
      return mxnet_nadam(w, g, s[0], s[1], n);
    case RuleSpec::Id::kMxnetAdagrad:
      return mxnet_adagrad(w, g, s[0], n);
    case RuleSpec::Id::kMxnetAdadelta:
      return mxnet_adadelta(w, g, s[0], s[1], n);
    case RuleSpec::Id::kMxnetRmsprop:
      return has[1] ? mxnet_rmsprop<true>(w, g, s[0], s[1], s[2], n)
                    : mxnet_rmsprop<false>(w, g, s[0], s[0], s[0], n);
    case RuleSpec::Id::kMxnetFtrl:
      return mxnet_ftrl(w, g, s[0], s[1], n);
    case RuleSpec::Id::kMxnetFtml:
      return mxnet_ftml(w, g, s[0], s[1], s[2], n);
    case RuleSpec::Id::kMxnetDcasgd:
      return has[1] ? mxnet_dcasgd<true>(w, g, s[0], s[1], n)
                    : mxnet_dcasgd<false>(w, g, s[0], s[0], n);
    case RuleSpec::Id::kMxnetLars:
      return mxnet_lars(w, g, s[0], n);
    case RuleSpec::Id::kMxnetSgld: {
      const uint64_t bits =
          mixed_bits(step.stream + static_cast<uint64_t>(element));
      return mxnet_sgld(w, g, static_cast<T>(normal_number(bits)), n);
    }
    case RuleSpec::Id::kMxnetTest:
      return w + g;
    default:
      if (has[1]) {
        return has[2] ? rmsprop<true, true>(w, g, s[0], s[1], s[2], n)
                      : rmsprop<true, false>(w, g, s[0], s[1], s[0], n);
      }
      return has[2] ? rmsprop<false, true>(w, g, s[0], s[0], s[2], n)
                    : rmsprop<false, false>(w, g, s[0], s[0], s[0], n);
  }
}

// LAMB's new state; returns the direction.
template <typename T>
TORCHKV_HOST_DEVICE inline T lamb_first_pass(
    const Step<T>& step,
    T w,
    T g,
    T* s) {
  g = clipped(step, g) * step.last_scale;
  if (step.id == RuleSpec::Id::kLamb) {
    lamb_state(g, s[0], s[1], step.numbers);
  } else {
    mxnet_lamb_state(g, s[0], s[1], step.numbers);
  }
  return lamb_direction(w, s[0], s[1], step.numbers);
}

// A rule that has_norms(), with the rate that launch_rates has found.
template <typename T>
TORCHKV_HOST_DEVICE inline T scaled_update(
    const Step<T>& step,
    T w,
    T g,
    const bool* has,
    T* s,
    T rate) {
  RuleNumbers<T> n = step.numbers;
  if (is_lamb(step.id)) {
    return w - rate * lamb_direction(w, s[0], s[1], n);
  }
  g = clipped(step, g) * step.last_scale;
  if (step.id == RuleSpec::Id::kMxnetLars) {
    n.extra2 = rate;
    return mxnet_lars(w, g, s[0], n);
  }
  n.lr = rate;
  return has[0] ? mxnet_sgd_momentum(w, g, s[0], n) : mxnet_sgd(w, g, n);
}

} // namespace torchkv::kernels::cuda

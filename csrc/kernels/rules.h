#pragma once

#include <cmath>

#include "../core/host_device.h"
#include "../core/rule.h"

// The formulas of the rules for one element, shared by all kernels. Each has
// the order of operations of torch.optim's single-tensor implementation
// (foreach=False), so that results are bitwise equal.
//
// `w` is the weight, `g` the gradient (the sum of the values, scaled, clipped
// and negated to maximize); the other arguments are the state.
namespace torchkv::kernels {

// Nadam's momentum of step t is beta1 * (1 - 0.96^(t * decay) / 2), and its
// bias is the product of all momentums so far.
class NadamMomentum {
 public:
  NadamMomentum(double beta1, double decay, double step)
      : beta1_(beta1), log_base_(decay * std::log(0.96)), step_(step) {}

  double of_gradient() const {
    return (1 - at(step_)) / (1 - product());
  }
  double of_average() const {
    return at(step_ + 1) / (1 - product() * at(step_ + 1));
  }

 private:
  double at(double step) const {
    return beta1_ * (1 - std::exp(step * log_base_) / 2);
  }
  // Without a loop over the steps, which would take longer and longer: with
  // base = 0.96^decay, the logarithm of the product of (1 - base^i / 2) is the
  // sum over k of -(1/2)^k / k * (base^k + base^2k + ... + base^tk).
  double product() const {
    double log_product = 0;
    double weight = 1;
    for (int k = 1; k <= 60; ++k) {
      weight /= 2;
      const double log_ratio = k * log_base_;
      const double sum = log_ratio == 0 ? step_
                                        : std::exp(log_ratio) *
              std::expm1(step_ * log_ratio) / std::expm1(log_ratio);
      log_product -= weight / k * sum;
    }
    return std::pow(beta1_, step_) * std::exp(log_product);
  }

  double beta1_;
  double log_base_;
  double step_;
};

// MXNet's adam subtracts in the type of the arithmetic: after a hundred steps
// in fp32 with large rates, that changes weights by 1e-5.
template <typename T>
T one_minus(const RuleSpec& rule, double beta) {
  return rule.id == RuleSpec::Id::kMxnetAdam
      ? static_cast<T>(1) - static_cast<T>(beta)
      : static_cast<T>(1 - beta);
}

// A rule's hyperparameters for one key and one step, in the type of the
// arithmetic. Powers of the step count and other scalars are computed once, in
// double, as PyTorch computes them in Python.
template <typename T>
struct RuleNumbers {
  explicit RuleNumbers(const RuleStep& call)
      : RuleNumbers(call.rule, call.step, call.is_first) {}

  T lr;
  T weight_decay;
  T shrink; // 1 - lr * weight_decay: decoupled weight decay
  T momentum;
  T undampened;
  T beta1;
  T beta2;
  T alpha;
  T one_minus_beta1;
  T one_minus_beta2;
  T one_minus_alpha;
  T eps;
  T step_size = 0;
  T bias1 = 0;
  T sqrt_bias2 = 0;
  T decayed_lr = 0;
  T clip; // infinite for none
  T extra1;
  T extra2;
  T of_gradient = 0; // Nadam's factors
  T of_average = 0;
  T noise = 0; // SGLD's standard deviation
  bool nesterov;
  bool is_first;

 private:
  RuleNumbers(const RuleSpec& rule, int64_t step, bool first)
      : lr(static_cast<T>(rule.lr)),
        weight_decay(static_cast<T>(rule.weight_decay)),
        shrink(static_cast<T>(1 - rule.lr * rule.weight_decay)),
        momentum(static_cast<T>(rule.momentum)),
        undampened(static_cast<T>(1 - rule.dampening)),
        beta1(static_cast<T>(rule.beta1)),
        beta2(static_cast<T>(rule.beta2)),
        alpha(static_cast<T>(rule.alpha)),
        one_minus_beta1(one_minus<T>(rule, rule.beta1)),
        one_minus_beta2(one_minus<T>(rule, rule.beta2)),
        one_minus_alpha(static_cast<T>(1 - rule.alpha)),
        eps(static_cast<T>(rule.eps)),
        clip(
            rule.clip_gradient > 0 ? static_cast<T>(rule.clip_gradient)
                                   : static_cast<T>(INFINITY)),
        extra1(static_cast<T>(rule.extra1)),
        extra2(static_cast<T>(rule.extra2)),
        nesterov(rule.nesterov),
        is_first(first) {
    if (rule.id == RuleSpec::Id::kAdagrad) {
      decayed_lr = static_cast<T>(
          rule.lr / (1 + static_cast<double>(step - 1) * rule.lr_decay));
    } else if (rule.id == RuleSpec::Id::kMxnetSgld) {
      noise = static_cast<T>(std::sqrt(rule.lr));
    }
    if (!needs_powers(rule.id)) {
      return; // powers cost more than the sum of a small key
    }
    const auto steps = static_cast<double>(step);
    const double correction1 = 1 - std::pow(rule.beta1, steps);
    const double correction2 = 1 - std::pow(rule.beta2, steps);
    step_size = static_cast<T>(rule.lr / correction1);
    bias1 = static_cast<T>(correction1);
    sqrt_bias2 = static_cast<T>(std::sqrt(correction2));
    if (rule.id == RuleSpec::Id::kMxnetLamb && !rule.correction) {
      bias1 = sqrt_bias2 = 1;
    }
    if (rule.id == RuleSpec::Id::kMxnetAdam) {
      step_size =
          static_cast<T>(rule.lr * std::sqrt(correction2) / correction1);
    } else if (rule.id == RuleSpec::Id::kMxnetFtml) {
      step_size = static_cast<T>(correction1 / rule.lr);
    } else if (rule.id == RuleSpec::Id::kMxnetNadam) {
      const NadamMomentum momentums(rule.beta1, rule.extra1, steps);
      of_gradient = static_cast<T>(momentums.of_gradient());
      of_average = static_cast<T>(momentums.of_average());
    }
  }

  static bool needs_powers(RuleSpec::Id id) {
    switch (id) {
      case RuleSpec::Id::kAdam:
      case RuleSpec::Id::kLamb:
      case RuleSpec::Id::kMxnetAdam:
      case RuleSpec::Id::kMxnetAdamax:
      case RuleSpec::Id::kMxnetNadam:
      case RuleSpec::Id::kMxnetFtml:
      case RuleSpec::Id::kMxnetLamb:
        return true;
      default:
        return false;
    }
  }
};

// As torch.lerp: exact at both ends.
template <typename T>
TORCHKV_HOST_DEVICE inline T lerp(T from, T to, T weight) {
  return weight < T(0.5) ? from + weight * (to - from)
                         : to - (to - from) * (1 - weight);
}

// Not g + 0 * w, which is NaN for an infinite weight.
template <typename T>
TORCHKV_HOST_DEVICE inline T decayed(T w, T g, T weight_decay) {
  return weight_decay != 0 ? g + weight_decay * w : g;
}

// torch.optim.SGD
template <typename T>
TORCHKV_HOST_DEVICE inline T sgd(T w, T g, const RuleNumbers<T>& n) {
  return w - n.lr * decayed(w, g, n.weight_decay);
}

template <typename T>
TORCHKV_HOST_DEVICE inline T sgd_momentum(
    T w,
    T g,
    T& buffer,
    const RuleNumbers<T>& n) {
  g = decayed(w, g, n.weight_decay);
  buffer = n.is_first ? g : n.momentum * buffer + n.undampened * g;
  return w - n.lr * (n.nesterov ? g + n.momentum * buffer : buffer);
}

// torch.optim.Adam, and AdamW (decoupled). Only AMSGrad reads and writes
// `largest_sq`.
template <bool kDecoupled, bool kAmsgrad, typename T>
TORCHKV_HOST_DEVICE inline T adam(
    T w,
    T g,
    T& average,
    T& average_sq,
    T& largest_sq,
    const RuleNumbers<T>& n) {
  if constexpr (kDecoupled) {
    w = w * n.shrink;
  } else {
    g = decayed(w, g, n.weight_decay);
  }
  average = lerp(average, g, n.one_minus_beta1);
  average_sq = n.beta2 * average_sq + n.one_minus_beta2 * g * g;
  T sq = average_sq;
  if constexpr (kAmsgrad) {
    // Propagates NaN, as torch.maximum does.
    largest_sq = largest_sq < sq || sq != sq ? sq : largest_sq;
    sq = largest_sq;
  }
  return w - n.step_size * (average / (std::sqrt(sq) / n.sqrt_bias2 + n.eps));
}

// torch.optim.Adagrad
template <typename T>
TORCHKV_HOST_DEVICE inline T adagrad(
    T w,
    T g,
    T& sum_sq,
    const RuleNumbers<T>& n) {
  g = decayed(w, g, n.weight_decay);
  sum_sq = sum_sq + g * g;
  return w - n.decayed_lr * (g / (std::sqrt(sum_sq) + n.eps));
}

// torch.optim.RMSprop
template <bool kCentered, bool kMomentum, typename T>
TORCHKV_HOST_DEVICE inline T rmsprop(
    T w,
    T g,
    T& average_sq,
    T& average,
    T& buffer,
    const RuleNumbers<T>& n) {
  g = decayed(w, g, n.weight_decay);
  average_sq = n.alpha * average_sq + n.one_minus_alpha * g * g;
  T variance = average_sq;
  if constexpr (kCentered) {
    average = lerp(average, g, n.one_minus_alpha);
    variance = average_sq - average * average;
  }
  const T change = g / (std::sqrt(variance) + n.eps);
  if constexpr (kMomentum) {
    buffer = n.momentum * buffer + change;
    return w - n.lr * buffer;
  }
  return w - n.lr * change;
}

// Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023,
// algorithm 2.
template <typename T>
TORCHKV_HOST_DEVICE inline T lion(
    T w,
    T g,
    T& average,
    const RuleNumbers<T>& n) {
  const T direction = n.beta1 * average + n.one_minus_beta1 * g;
  average = n.beta2 * average + n.one_minus_beta2 * g;
  const T sign = direction > 0 ? T(1) : direction < 0 ? T(-1) : direction;
  return w - n.lr * decayed(w, sign, n.weight_decay);
}

// LAMB: You et al., "Large Batch Optimization for Deep Learning", 2020,
// algorithm 2, with phi(x) = x. The first pass updates the state; the second,
// once the norms of weight and direction are known, the weight.
template <typename T>
TORCHKV_HOST_DEVICE inline void lamb_state(
    T g,
    T& average,
    T& average_sq,
    const RuleNumbers<T>& n) {
  average = lerp(average, g, n.one_minus_beta1);
  average_sq = n.beta2 * average_sq + n.one_minus_beta2 * g * g;
}

template <typename T>
TORCHKV_HOST_DEVICE inline T lamb_direction(
    T w,
    T average,
    T average_sq,
    const RuleNumbers<T>& n) {
  const T change =
      (average / n.bias1) / (std::sqrt(average_sq) / n.sqrt_bias2 + n.eps);
  return decayed(w, change, n.weight_decay);
}

} // namespace torchkv::kernels

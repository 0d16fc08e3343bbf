#pragma once

#include <cmath>

#include "rules.h"

// The formulas of MXNet 1.9.1 for one element; see rules.h. Some limit the
// gradient to [-clip, clip] before they add the weight decay, and some after.
namespace torchkv::kernels {

template <typename T>
TORCHKV_HOST_DEVICE inline T limited(T number, T limit) {
  number = number > limit ? limit : number; // propagates NaN
  return number < -limit ? -limit : number;
}

template <typename T>
TORCHKV_HOST_DEVICE inline T clipped_then_decayed(
    T w,
    T g,
    const RuleNumbers<T>& n) {
  return decayed(w, limited(g, n.clip), n.weight_decay);
}

template <typename T>
TORCHKV_HOST_DEVICE inline T decayed_then_clipped(
    T w,
    T g,
    const RuleNumbers<T>& n) {
  return limited(decayed(w, g, n.weight_decay), n.clip);
}

// -1, 0, 1 or NaN
template <typename T>
TORCHKV_HOST_DEVICE inline T sign_of(T number) {
  return number > 0 ? T(1) : number < 0 ? T(-1) : number;
}

template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_sgd(T w, T g, const RuleNumbers<T>& n) {
  return w - n.lr * clipped_then_decayed(w, g, n);
}

// The momentum contains the learning rate.
template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_sgd_momentum(
    T w,
    T g,
    T& momentum,
    const RuleNumbers<T>& n) {
  momentum = n.momentum * momentum - n.lr * clipped_then_decayed(w, g, n);
  return w + momentum;
}

template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_nag_momentum(
    T w,
    T g,
    T& momentum,
    const RuleNumbers<T>& n) {
  g = limited(g, n.clip);
  const T before = n.momentum * momentum;
  const T change = n.lr * decayed(w, g, n.weight_decay);
  w = w + (n.momentum * (before - change) - change);
  // MXNet computes the momentum after it has written the weight.
  momentum = before - n.lr * decayed(w, g, n.weight_decay);
  return w;
}

// signSGD. `extra1` is a second weight decay, outside of the sign (wd_lh).
template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_signsgd(T w, T g, const RuleNumbers<T>& n) {
  return w - n.lr * decayed(w, sign_of(g), n.weight_decay);
}

template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_signum(
    T w,
    T g,
    T& momentum,
    const RuleNumbers<T>& n) {
  momentum =
      n.momentum * momentum - (1 - n.momentum) * clipped_then_decayed(w, g, n);
  return w + n.lr * decayed(w, sign_of(momentum), -n.extra1);
}

template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_adam(
    T w,
    T g,
    T& mean,
    T& variance,
    const RuleNumbers<T>& n) {
  g = decayed_then_clipped(w, g, n);
  mean = n.beta1 * mean + n.one_minus_beta1 * g;
  variance = n.beta2 * variance + n.one_minus_beta2 * g * g;
  return w - n.step_size * mean / (std::sqrt(variance) + n.eps);
}

// MXNet divides 0 by 0 until an element has its first gradient.
template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_adamax(
    T w,
    T g,
    T& mean,
    T& norm,
    const RuleNumbers<T>& n) {
  g = decayed_then_clipped(w, g, n);
  mean = n.beta1 * mean + n.one_minus_beta1 * g;
  const T size = std::abs(g);
  norm = n.beta2 * norm;
  norm = norm < size || size != size ? size : norm; // propagates NaN
  return norm == 0 ? w : w - n.step_size * mean / norm;
}

template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_nadam(
    T w,
    T g,
    T& mean,
    T& variance,
    const RuleNumbers<T>& n) {
  g = decayed_then_clipped(w, g, n);
  mean = n.beta1 * mean + n.one_minus_beta1 * g;
  variance = n.beta2 * variance + n.one_minus_beta2 * g * g;
  const T change = n.of_gradient * g + n.of_average * mean;
  return w - n.lr * change / (std::sqrt(variance) / n.sqrt_bias2 + n.eps);
}

// The epsilon is inside of the root.
template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_adagrad(
    T w,
    T g,
    T& history,
    const RuleNumbers<T>& n) {
  g = limited(g, n.clip);
  history = history + g * g;
  return w - n.lr * decayed(w, g / std::sqrt(history + n.eps), n.weight_decay);
}

// One history for each row, to which the mean of the squares of its gradient
// has been added.
template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_group_adagrad(
    T w,
    T g,
    T history,
    const RuleNumbers<T>& n) {
  return w - n.lr * (limited(g, n.clip) / std::sqrt(history + n.eps));
}

// Without a learning rate.
template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_adadelta(
    T w,
    T g,
    T& average_sq,
    T& changes_sq,
    const RuleNumbers<T>& n) {
  g = limited(g, n.clip);
  average_sq = n.alpha * average_sq + n.one_minus_alpha * g * g;
  const T change =
      std::sqrt(changes_sq + n.eps) / std::sqrt(average_sq + n.eps) * g;
  changes_sq = n.alpha * changes_sq + n.one_minus_alpha * change * change;
  return w - decayed(w, change, n.weight_decay);
}

// `extra1` limits the weight (clip_weights; 0 = off).
template <bool kCentered, typename T>
TORCHKV_HOST_DEVICE inline T mxnet_rmsprop(
    T w,
    T g,
    T& average_sq,
    T& average,
    T& change,
    const RuleNumbers<T>& n) {
  g = decayed_then_clipped(w, g, n);
  average_sq = n.alpha * average_sq + n.one_minus_alpha * g * g;
  if constexpr (kCentered) {
    average = n.alpha * average + n.one_minus_alpha * g;
    const T variance = average_sq - average * average;
    change = n.momentum * change - n.lr * (g / std::sqrt(variance + n.eps));
    w = w + change;
  } else {
    w = w - n.lr * (g / std::sqrt(average_sq + n.eps));
  }
  return n.extra1 > 0 ? limited(w, n.extra1) : w;
}

// `extra1` is lamda1, `extra2` beta. The learning rate is a divisor: with 0
// there is no step.
template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_ftrl(
    T w,
    T g,
    T& z,
    T& sum_sq,
    const RuleNumbers<T>& n) {
  if (n.lr == 0) {
    return w;
  }
  g = limited(g, n.clip);
  const T before = std::sqrt(sum_sq);
  sum_sq = sum_sq + g * g;
  const T root = std::sqrt(sum_sq);
  z = z + (g - (root - before) * w / n.lr);
  const T rest = std::abs(z) - n.extra1;
  return rest <= 0 // NaN continues
      ? T(0)
      : -sign_of(z) * rest / ((n.extra2 + root) / n.lr + n.weight_decay);
}

template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_ftml(
    T w,
    T g,
    T& d,
    T& average_sq,
    T& z,
    const RuleNumbers<T>& n) {
  if (n.lr == 0) { // a divisor
    return w;
  }
  g = decayed_then_clipped(w, g, n);
  average_sq = n.beta2 * average_sq + n.one_minus_beta2 * g * g;
  const T next = n.step_size * (std::sqrt(average_sq) / n.sqrt_bias2 + n.eps);
  z = n.beta1 * z + n.one_minus_beta1 * g - (next - n.beta1 * d) * w;
  d = next;
  return -z / d;
}

// `extra1` is lamda. New state is the weight.
template <bool kMomentum, typename T>
TORCHKV_HOST_DEVICE inline T mxnet_dcasgd(
    T w,
    T g,
    T& previous,
    T& momentum,
    const RuleNumbers<T>& n) {
  g = limited(g, n.clip);
  T change = -n.lr *
      (decayed(w, g, n.weight_decay) + n.extra1 * g * g * (w - previous));
  if constexpr (kMomentum) {
    change = n.momentum * momentum + change;
    momentum = change;
  }
  previous = w;
  return w + change;
}

// LARS with a momentum that does not contain the learning rate. `extra2` is the
// ratio of the norms (scaled_by_norms).
template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_lars(
    T w,
    T g,
    T& momentum,
    const RuleNumbers<T>& n) {
  if (n.lr == 0) {
    momentum = 0;
    return w;
  }
  momentum = n.momentum * momentum - n.extra2 * clipped_then_decayed(w, g, n);
  return w + n.lr * momentum;
}

// `random` is a number of the standard normal distribution.
template <typename T>
TORCHKV_HOST_DEVICE inline T mxnet_sgld(
    T w,
    T g,
    T random,
    const RuleNumbers<T>& n) {
  return w - n.lr / 2 * clipped_then_decayed(w, g, n) + n.noise * random;
}

// As lamb_state.
template <typename T>
TORCHKV_HOST_DEVICE inline void mxnet_lamb_state(
    T g,
    T& mean,
    T& variance,
    const RuleNumbers<T>& n) {
  g = limited(g, n.clip);
  mean = n.beta1 * mean + n.one_minus_beta1 * g;
  variance = n.beta2 * variance + n.one_minus_beta2 * g * g;
}

} // namespace torchkv::kernels

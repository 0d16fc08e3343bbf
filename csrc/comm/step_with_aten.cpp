#include "step_with_aten.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>

#include <cmath>

#include "../core/errors.h"
#include "../kernels/rules.h"
#include "mxnet_step_with_aten.h"

namespace torchkv {
namespace {

// Real and imaginary parts count as separate numbers.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_complex() ? at::view_as_real(tensor)
                                                 : tensor;
}

void scale_and_clip(const RuleStep& step, at::Tensor& gradient) {
  if (step.scale != 1) {
    gradient.mul_(step.scale);
  }
  if (step.clip_value != 0) {
    gradient.clamp_(-step.clip_value, step.clip_value);
  }
}

} // namespace

// The squares of fp32 numbers are in fp64's range; fp64 numbers are divided by
// the largest first.
at::Tensor norm_of(const at::Tensor& numbers) {
  if (numbers.scalar_type() != at::kDouble || numbers.numel() == 0) {
    return at::linalg_vector_norm(numbers, 2, {}, false, at::kDouble);
  }
  at::Tensor largest = numbers.abs().amax();
  largest = at::where(
      largest.gt(0).logical_and(largest.isfinite()),
      largest,
      at::ones_like(largest));
  return numbers.div(largest).norm().mul_(largest);
}

void step_with_aten(
    const RuleStep& step,
    const at::Tensor& gradient,
    const at::Tensor& weight,
    std::array<at::Tensor, kMaxStates> states,
    const RowsOfWeight* rows) {
  at::Tensor w = as_real(weight);
  at::Tensor g = as_real(gradient.to(weight.scalar_type()));
  at::Tensor& s0 = states[0] = as_real(states[0]);
  at::Tensor& s1 = states[1] = as_real(states[1]);
  at::Tensor& s2 = states[2] = as_real(states[2]);
  const RuleSpec& rule = step.rule;
  scale_and_clip(step, g);
  const double last_scale = rule.maximize ? -step.last_scale : step.last_scale;
  if (last_scale != 1) {
    g.mul_(last_scale);
  }
  if (is_mxnet(rule)) {
    mxnet_step_with_aten(step, g, w, states, rows);
    return;
  }
  const kernels::RuleNumbers<double> n(step);
  const bool is_coupled = rule.id != RuleSpec::Id::kLion &&
      rule.id != RuleSpec::Id::kLamb && !rule.decoupled;
  if (is_coupled && rule.weight_decay != 0) {
    g.add_(w, rule.weight_decay);
  }
  const auto add_square = [&](at::Tensor& average, double beta) {
    average.mul_(beta).addcmul_(g, g, 1 - beta);
  };
  switch (rule.id) {
    case RuleSpec::Id::kSgd:
      if (s0.defined()) {
        if (step.is_first) {
          s0.copy_(g);
        } else {
          s0.mul_(rule.momentum).add_(g, 1 - rule.dampening);
        }
        g = rule.nesterov ? g.add_(s0, rule.momentum) : s0;
      }
      w.sub_(g, rule.lr);
      break;
    case RuleSpec::Id::kAdam: {
      if (rule.decoupled) {
        w.mul_(n.shrink);
      }
      s0.lerp_(g, 1 - rule.beta1);
      add_square(s1, rule.beta2);
      if (s2.defined()) {
        at::maximum_out(s2, s2, s1);
      }
      const at::Tensor root = (s2.defined() ? s2 : s1).sqrt();
      w.addcdiv_(s0, root.div_(n.sqrt_bias2).add_(rule.eps), -n.step_size);
      break;
    }
    case RuleSpec::Id::kAdagrad:
      s0.addcmul_(g, g);
      w.addcdiv_(g, s0.sqrt().add_(rule.eps), -n.decayed_lr);
      break;
    case RuleSpec::Id::kRmsprop: {
      add_square(s0, rule.alpha);
      at::Tensor variance = s0;
      if (s1.defined()) {
        s1.lerp_(g, 1 - rule.alpha);
        variance = s0.addcmul(s1, s1, -1);
      }
      const at::Tensor root = variance.sqrt().add_(rule.eps);
      if (s2.defined()) {
        s2.mul_(rule.momentum).addcdiv_(g, root);
        w.sub_(s2, rule.lr);
      } else {
        w.addcdiv_(g, root, -rule.lr);
      }
      break;
    }
    case RuleSpec::Id::kLion: {
      const at::Tensor direction = s0.mul(rule.beta1).add_(g, 1 - rule.beta1);
      // at::sign is 0 for NaN.
      at::Tensor change =
          at::where(direction.isnan(), direction, direction.sign());
      s0.mul_(rule.beta2).add_(g, 1 - rule.beta2);
      w.sub_(change.add_(w, rule.weight_decay), rule.lr);
      break;
    }
    case RuleSpec::Id::kLamb: {
      s0.lerp_(g, 1 - rule.beta1);
      add_square(s1, rule.beta2);
      at::Tensor direction =
          s0.div(n.bias1).div_(s1.sqrt().div_(n.sqrt_bias2).add_(rule.eps));
      if (rule.weight_decay != 0) {
        direction.add_(w, rule.weight_decay);
      }
      // On the device: the host does not wait for the norms.
      const at::Tensor weight_norm = norm_of(w);
      const at::Tensor direction_norm = norm_of(direction);
      const at::Tensor trust =
          at::where(
              weight_norm.gt(0).logical_and(direction_norm.gt(0)),
              weight_norm / direction_norm,
              at::ones_like(weight_norm))
              .to(w.scalar_type());
      w.sub_(direction.mul_(trust), rule.lr);
      break;
    }
    default:
      TORCHKV_INTERNAL_ASSERT(false);
  }
}

at::Tensor squared_norm_with_aten(
    const RuleStep& step,
    const at::Tensor& gradient,
    double scale) {
  at::Tensor g = as_real(gradient);
  scale_and_clip(step, g);
  g = g.to(at::kDouble);
  return (scale == 1 ? g : g.mul_(scale)).square_().sum();
}

} // namespace torchkv

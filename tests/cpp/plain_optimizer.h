#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/rule.h"

namespace torchkv::testing {

// The rules as a plain loop in double, written from the documentation of
// torch.optim and MXNet. One key of real numbers, element by element.
class PlainOptimizer {
 public:
  explicit PlainOptimizer(const at::Tensor& value)
      : w(numbers_of(value)), m_(w.size()), v_(w.size()), x_(w.size()) {}

  static std::vector<double> numbers_of(const at::Tensor& tensor) {
    at::Tensor real = tensor.resolve_conj().resolve_neg().contiguous();
    real = real.is_complex() ? at::view_as_real(real) : real;
    real = real.to(at::kDouble).contiguous();
    const auto* data = real.const_data_ptr<double>();
    return {data, data + real.numel()};
  }

  void step(const RuleSpec& rule, const at::Tensor& gradient) {
    const auto gradients = numbers_of(gradient);
    ++t_;
    if (t_ == 1 && rule.id == RuleSpec::Id::kAdagrad) {
      v_.assign(w.size(), rule.initial_accumulator_value);
    }
    std::vector<double> directions;
    double weight_norm = 0;
    double direction_norm = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = rule.maximize ? -gradients[i] : gradients[i];
      if (rule.id == RuleSpec::Id::kLamb) {
        moments(rule, g, i);
        const double u = m_[i] / (1 - std::pow(rule.beta1, t_)) /
                (std::sqrt(v_[i] / (1 - std::pow(rule.beta2, t_))) + rule.eps) +
            rule.weight_decay * w[i];
        directions.push_back(u);
        weight_norm += w[i] * w[i];
        direction_norm += u * u;
      } else {
        w[i] = one(rule, g, i);
      }
    }
    for (size_t i = 0; i < directions.size(); ++i) {
      const double trust = weight_norm > 0 && direction_norm > 0
          ? std::sqrt(weight_norm / direction_norm)
          : 1;
      w[i] -= rule.lr * trust * directions[i];
    }
  }

  // In the shape and the dtype of `model`.
  at::Tensor like(const at::Tensor& model) const {
    const auto real = at::tensor(w, at::kDouble);
    if (!model.is_complex()) {
      return real.view(model.sizes()).to(model.scalar_type());
    }
    auto sizes = model.sizes().vec();
    sizes.push_back(2);
    return at::view_as_complex(real.view(sizes)).to(model.scalar_type());
  }

  std::vector<double> w;

 private:
  void moments(const RuleSpec& rule, double g, size_t i) {
    m_[i] = rule.beta1 * m_[i] + (1 - rule.beta1) * g;
    v_[i] = rule.beta2 * v_[i] + (1 - rule.beta2) * g * g;
  }

  double one(const RuleSpec& rule, double g, size_t i) {
    if (is_mxnet(rule)) {
      return mxnet(rule, g, i);
    }
    const double lr = rule.lr;
    double weight = w[i];
    if (rule.decoupled) {
      weight -= lr * rule.weight_decay * weight;
    } else if (rule.id != RuleSpec::Id::kLion) {
      g += rule.weight_decay * weight;
    }
    switch (rule.id) {
      case RuleSpec::Id::kSgd: {
        if (rule.momentum == 0) {
          return weight - lr * g;
        }
        double& b = m_[i];
        b = t_ == 1 ? g : rule.momentum * b + (1 - rule.dampening) * g;
        return weight - lr * (rule.nesterov ? g + rule.momentum * b : b);
      }
      case RuleSpec::Id::kAdam: {
        moments(rule, g, i);
        const double m = m_[i] / (1 - std::pow(rule.beta1, t_));
        // torch.optim takes the largest before the correction.
        x_[i] = std::max(x_[i], v_[i]);
        const double v =
            (rule.amsgrad ? x_[i] : v_[i]) / (1 - std::pow(rule.beta2, t_));
        return weight - lr * m / (std::sqrt(v) + rule.eps);
      }
      case RuleSpec::Id::kAdagrad:
        v_[i] += g * g;
        return weight -
            lr / (1 + (t_ - 1) * rule.lr_decay) * g /
            (std::sqrt(v_[i]) + rule.eps);
      case RuleSpec::Id::kRmsprop: {
        v_[i] = rule.alpha * v_[i] + (1 - rule.alpha) * g * g;
        x_[i] = rule.alpha * x_[i] + (1 - rule.alpha) * g;
        const double v = rule.centered ? v_[i] - x_[i] * x_[i] : v_[i];
        const double change = g / (std::sqrt(v) + rule.eps);
        m_[i] = rule.momentum * m_[i] + change;
        return weight - lr * (rule.momentum > 0 ? m_[i] : change);
      }
      case RuleSpec::Id::kLion: {
        const double c = rule.beta1 * m_[i] + (1 - rule.beta1) * g;
        m_[i] = rule.beta2 * m_[i] + (1 - rule.beta2) * g;
        return weight - lr * ((c > 0) - (c < 0) + rule.weight_decay * weight);
      }
      default:
        ADD_FAILURE();
        return 0;
    }
  }

  static double clip(double number, double limit) {
    return limit > 0 ? std::max(-limit, std::min(number, limit)) : number;
  }

  // MXNet's, with its names of what the numbered members are.
  double mxnet(const RuleSpec& rule, double g, size_t i) {
    using Id = RuleSpec::Id;
    const double lr = rule.lr;
    const double wd = rule.weight_decay;
    const double eps = rule.eps;
    const double limit = rule.clip_gradient;
    const double weight = w[i];
    const double bias1 = 1 - std::pow(rule.beta1, t_);
    const double bias2 = 1 - std::pow(rule.beta2, t_);
    double& m = m_[i];
    double& v = v_[i];
    double& x = x_[i];
    const bool decays_first = rule.id == Id::kMxnetAdam ||
        rule.id == Id::kMxnetAdamax || rule.id == Id::kMxnetNadam ||
        rule.id == Id::kMxnetRmsprop || rule.id == Id::kMxnetFtml;
    g = clip(decays_first ? g + wd * weight : g, limit);
    switch (rule.id) {
      case Id::kMxnetSgd:
        m = rule.momentum * m - lr * (g + wd * weight);
        return weight + m;
      case Id::kMxnetNag: {
        const double change = lr * (g + wd * weight);
        const double result =
            weight + rule.momentum * (rule.momentum * m - change) - change;
        m = rule.momentum * m - lr * (g + wd * result);
        return result;
      }
      case Id::kMxnetSignum:
        if (rule.momentum == 0) {
          return (1 - lr * wd) * weight - lr * ((g > 0) - (g < 0));
        }
        m = rule.momentum * m - (1 - rule.momentum) * (g + wd * weight);
        return (1 - lr * rule.extra1) * weight + lr * ((m > 0) - (m < 0));
      case Id::kMxnetAdam:
        moments(rule, g, i);
        return weight -
            lr * std::sqrt(bias2) / bias1 * m / (std::sqrt(v) + eps);
      case Id::kMxnetAdamax:
        m = rule.beta1 * m + (1 - rule.beta1) * g;
        v = std::max(rule.beta2 * v, std::abs(g));
        return v == 0 ? weight : weight - lr / bias1 * m / v;
      case Id::kMxnetNadam: {
        moments(rule, g, i);
        const auto momentum = [&](double t) {
          return rule.beta1 * (1 - std::pow(0.96, t * rule.extra1) / 2);
        };
        double product = 1;
        for (double t = 1; t <= t_; ++t) {
          product *= momentum(t);
        }
        const double next = momentum(t_ + 1);
        const double mean = (1 - momentum(t_)) * g / (1 - product) +
            next * m / (1 - product * next);
        return weight - lr * mean / (std::sqrt(v / bias2) + eps);
      }
      case Id::kMxnetAdagrad:
        v += g * g;
        return weight - lr * (g / std::sqrt(v + eps) + wd * weight);
      case Id::kMxnetAdadelta: {
        v = rule.alpha * v + (1 - rule.alpha) * g * g;
        const double change = std::sqrt(m + eps) / std::sqrt(v + eps) * g;
        m = rule.alpha * m + (1 - rule.alpha) * change * change;
        return weight - change - wd * weight;
      }
      case Id::kMxnetRmsprop: {
        v = rule.alpha * v + (1 - rule.alpha) * g * g;
        x = rule.alpha * x + (1 - rule.alpha) * g;
        const double square = rule.centered ? v - x * x : v;
        const double change = -lr * g / std::sqrt(square + eps);
        m = rule.momentum * m + change;
        return clip(weight + (rule.centered ? m : change), rule.extra1);
      }
      case Id::kMxnetFtrl: {
        const double before = std::sqrt(v);
        v += g * g;
        m += g - (std::sqrt(v) - before) * weight / lr;
        const double rest = std::max(std::abs(m) - rule.extra1, 0.);
        const double divisor = (rule.extra2 + std::sqrt(v)) / lr + wd;
        return (m > 0 ? -rest : rest) / divisor;
      }
      case Id::kMxnetFtml: {
        v = rule.beta2 * v + (1 - rule.beta2) * g * g;
        const double d = bias1 / lr * (std::sqrt(v / bias2) + eps);
        m = rule.beta1 * m + (1 - rule.beta1) * g -
            (d - rule.beta1 * x) * weight;
        x = d;
        return -m / d;
      }
      case Id::kMxnetDcasgd: {
        const double moved = t_ == 1 ? 0 : weight - x;
        m = rule.momentum * m -
            lr * (g + wd * weight + rule.extra1 * g * g * moved);
        x = weight;
        return weight + m;
      }
      case Id::kMxnetTest:
        return weight + g;
      default:
        ADD_FAILURE();
        return 0;
    }
  }

  double t_ = 0;
  std::vector<double> m_;
  std::vector<double> v_;
  std::vector<double> x_; // the largest, or the mean
};

} // namespace torchkv::testing

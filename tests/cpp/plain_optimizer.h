#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/rule.h"

namespace torchkv::testing {

// The rules as a plain loop in double, written from the documentation of
// torch.optim. One key of real numbers, element by element.
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

  double t_ = 0;
  std::vector<double> m_;
  std::vector<double> v_;
  std::vector<double> x_; // the largest, or the mean
};

} // namespace torchkv::testing

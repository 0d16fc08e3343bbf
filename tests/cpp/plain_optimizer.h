#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "core/key.h"
#include "core/mixed_bits.h"
#include "core/normal.h"
#include "core/random_stream.h"
#include "core/rule.h"

namespace torchkv::testing {

// The rules as a plain loop in double, written from the documentation of
// torch.optim and MXNet. One key of real numbers, element by element.
class PlainOptimizer {
 public:
  explicit PlainOptimizer(const at::Tensor& value, Key key = 1)
      : w(numbers_of(value)),
        key_(std::move(key)),
        m_(w.size()),
        v_(w.size()),
        x_(w.size()) {}

  static std::vector<double> numbers_of(const at::Tensor& tensor) {
    at::Tensor real = tensor.resolve_conj().resolve_neg().contiguous();
    real = real.is_complex() ? at::view_as_real(real) : real;
    real = real.to(at::kDouble).contiguous();
    const auto* data = real.const_data_ptr<double>();
    return {data, data + real.numel()};
  }

  void step(const RuleSpec& rule, const at::Tensor& gradient) {
    using Id = RuleSpec::Id;
    auto gradients = numbers_of(gradient);
    const double batch_scale = rule.id == Id::kMxnetLbsgd ? rule.alpha : 1;
    for (double& g : gradients) {
      g = (rule.maximize ? -g : g) / batch_scale;
    }
    ++t_;
    if (t_ == 1 && rule.id == Id::kAdagrad) {
      v_.assign(w.size(), rule.initial_accumulator_value);
    }
    if (t_ == 1 && rule.id == Id::kMxnetDcasgd) {
      x_ = w;
    }
    lr_ = rule.lr * rate(rule, norm(w), norm(gradients));
    if (rule.id == Id::kLamb || rule.id == Id::kMxnetLamb) {
      lamb(rule, gradients);
      return;
    }
    for (size_t i = 0; i < w.size(); ++i) {
      w[i] = one(rule, gradients[i], i);
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

  static double norm(const std::vector<double>& numbers) {
    double sum = 0;
    for (const double number : numbers) {
      sum += number * number;
    }
    return std::sqrt(sum);
  }

  // What LARS and LBSGD multiply the learning rate by.
  double rate(const RuleSpec& rule, double of_w, double of_g) const {
    using Id = RuleSpec::Id;
    if (rule.id == Id::kMxnetLars && rule.extra1 > 0 && of_w > 0 && of_g > 0) {
      return rule.extra1 * of_w / (of_g + rule.weight_decay * of_w + rule.eps);
    }
    if (rule.id != Id::kMxnetLbsgd) {
      return 1;
    }
    const double most = rule.alpha;
    const double part = t_ * most / rule.extra2;
    switch (static_cast<int>(rule.extra1)) {
      case 0:
        return part < 1 ? 1 + (most - 1) * part : most;
      case 1:
        return part < 1 ? 1 + (most - 1) * part * part : most;
      case 2:
        return part < 1 ? 1 + (most - 1) * std::sqrt(part) : most;
      default: {
        const double divisor =
            of_g * of_g + rule.weight_decay * of_w * of_w + 1e-18;
        const double ratio = std::sqrt(of_w * of_w / divisor);
        return std::max(0.01, std::min(ratio, 100.));
      }
    }
  }

  void lamb(const RuleSpec& rule, const std::vector<double>& gradients) {
    const bool is_mxnet = rule.id == RuleSpec::Id::kMxnetLamb;
    const bool corrects = rule.correction || !is_mxnet;
    const double bias1 = corrects ? 1 - std::pow(rule.beta1, t_) : 1;
    const double bias2 = corrects ? 1 - std::pow(rule.beta2, t_) : 1;
    std::vector<double> directions;
    for (size_t i = 0; i < w.size(); ++i) {
      moments(rule, clip(gradients[i], is_mxnet ? rule.clip_gradient : 0), i);
      directions.push_back(
          m_[i] / bias1 / (std::sqrt(v_[i] / bias2) + rule.eps) +
          rule.weight_decay * w[i]);
    }
    double of_w = norm(w);
    if (is_mxnet && rule.extra1 > 0) {
      of_w = std::max(of_w, rule.extra1);
    }
    if (is_mxnet && rule.extra2 > 0) {
      of_w = std::min(of_w, rule.extra2);
    }
    const double length = norm(directions);
    const double trust = of_w > 0 && length > 0 ? of_w / length : 1;
    for (size_t i = 0; i < w.size(); ++i) {
      w[i] -= rule.lr * trust * directions[i];
    }
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
    const double lr = lr_;
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
      case Id::kMxnetLars: // with a constant rate
      case Id::kMxnetLbsgd:
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
        m = rule.momentum * m -
            lr * (g + wd * weight + rule.extra1 * g * g * (weight - x));
        x = weight;
        return weight + m;
      }
      case Id::kMxnetTest:
        return weight + g;
      case Id::kMxnetSgld: {
        const uint64_t stream = random_stream(
            static_cast<uint64_t>(rule.extra1),
            key_,
            {static_cast<uint64_t>(t_ - 1)});
        return weight - lr / 2 * (g + wd * weight) +
            std::sqrt(lr) * normal_number(mixed_bits(stream + i));
      }
      default:
        ADD_FAILURE();
        return 0;
    }
  }

  Key key_;
  double t_ = 0;
  double lr_ = 0; // of the step
  std::vector<double> m_;
  std::vector<double> v_;
  std::vector<double> x_; // the largest, or the mean
};

} // namespace torchkv::testing

#include "mxnet_step_with_aten.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../kernels/rules.h"
#include "random_with_aten.h"

namespace torchkv {
namespace {

// One step; the formulas are those of kernels/mxnet_rules.h and, at the end,
// GroupAdaGrad's, which has no kernel on GPUs.
class MxnetStep {
 public:
  MxnetStep(
      const RuleStep& step,
      at::Tensor gradient,
      at::Tensor weight,
      std::array<at::Tensor, kMaxStates> states,
      const RowsOfWeight* rows)
      : step_(step),
        rule_(step.rule),
        n_(step),
        g_(std::move(gradient)),
        w_(std::move(weight)),
        s_(std::move(states)),
        rows_(rows) {}

  void run() {
    using Id = RuleSpec::Id;
    switch (rule_.id) {
      case Id::kMxnetSgd:
        return sgd(rule_.lr);
      case Id::kMxnetNag:
        return nag();
      case Id::kMxnetSignum:
        return signum();
      case Id::kMxnetAdam:
        update_moments();
        w_.addcdiv_(s_[0], s_[1].sqrt().add_(rule_.eps), -n_.step_size);
        return;
      case Id::kMxnetAdamax:
        return adamax();
      case Id::kMxnetNadam: {
        update_moments();
        g_.mul_(n_.of_gradient).add_(s_[0], n_.of_average);
        const auto root = s_[1].sqrt().div_(n_.sqrt_bias2).add_(rule_.eps);
        w_.addcdiv_(g_, root, -rule_.lr);
        return;
      }
      case Id::kMxnetAdagrad:
        clip();
        s_[0].addcmul_(g_, g_);
        g_.div_(s_[0].add(rule_.eps).sqrt_());
        decay();
        w_.sub_(g_, rule_.lr);
        return;
      case Id::kMxnetAdadelta: {
        clip();
        average_square(s_[0], g_, rule_.alpha);
        g_.mul_(s_[1].add(rule_.eps).sqrt_());
        g_.div_(s_[0].add(rule_.eps).sqrt_());
        average_square(s_[1], g_, rule_.alpha);
        decay();
        w_.sub_(g_);
        return;
      }
      case Id::kMxnetRmsprop:
        return rmsprop();
      case Id::kMxnetFtrl:
        return ftrl();
      case Id::kMxnetFtml:
        return ftml();
      case Id::kMxnetDcasgd:
        return dcasgd();
      case Id::kMxnetTest:
        w_.add_(g_);
        return;
      case Id::kMxnetLamb:
        return lamb();
      case Id::kMxnetLars:
        return lars();
      case Id::kMxnetLbsgd:
        return lbsgd();
      case Id::kMxnetSgld:
        clip();
        decay();
        w_.sub_(g_, rule_.lr / 2)
            .add_(
                rows_ == nullptr
                    ? normal_numbers_with_aten(w_, step_.stream)
                    : normal_numbers_with_aten(w_, step_.stream, rows_->ids),
                n_.noise);
        return;
      case Id::kMxnetGroupAdagrad:
        return group_adagrad();
      default:
        TORCHKV_INTERNAL_ASSERT(false);
    }
  }

 private:
  void clip() {
    if (rule_.clip_gradient > 0) {
      g_.clamp_(-rule_.clip_gradient, rule_.clip_gradient);
    }
  }
  void decay() {
    if (rule_.weight_decay != 0) {
      g_.add_(w_, rule_.weight_decay);
    }
  }
  static void average_square(
      at::Tensor& average,
      const at::Tensor& x,
      double beta) {
    average.mul_(beta).addcmul_(x, x, 1 - beta);
  }
  // at::sign is 0 for NaN.
  static at::Tensor sign_or_nan(const at::Tensor& x) {
    return at::where(x.isnan(), x, x.sign());
  }
  void update_moments() {
    decay();
    clip();
    s_[0].mul_(rule_.beta1).add_(g_, rest_of(rule_.beta1));
    s_[1].mul_(rule_.beta2).addcmul_(g_, g_, rest_of(rule_.beta2));
  }
  double rest_of(double beta) const {
    const bool is_double =
        c10::toRealValueType(g_.scalar_type()) == c10::kDouble;
    return is_double ? kernels::one_minus<double>(rule_, beta)
                     : kernels::one_minus<float>(rule_, beta);
  }

  // `rate` is a number, or a tensor of no dimensions.
  template <typename Rate>
  void sgd(const Rate& rate) {
    clip();
    decay();
    g_.mul_(rate);
    if (s_[0].defined()) {
      s_[0].mul_(rule_.momentum).sub_(g_);
      w_.add_(s_[0]);
    } else {
      w_.sub_(g_);
    }
  }

  void nag() {
    if (!s_[0].defined()) {
      return sgd(rule_.lr);
    }
    clip();
    at::Tensor& momentum = s_[0].mul_(rule_.momentum);
    const auto change = g_.add(w_, rule_.weight_decay).mul_(rule_.lr);
    w_.add_(momentum.sub(change).mul_(rule_.momentum).sub_(change));
    momentum.sub_(g_.add_(w_, rule_.weight_decay), rule_.lr);
  }

  void signum() {
    if (!s_[0].defined()) {
      g_ = sign_or_nan(g_);
      decay();
      w_.sub_(g_, rule_.lr);
      return;
    }
    clip();
    decay();
    s_[0].mul_(rule_.momentum).sub_(g_, 1 - rule_.momentum);
    at::Tensor change = sign_or_nan(s_[0]);
    if (rule_.extra1 != 0) {
      change.sub_(w_, rule_.extra1);
    }
    w_.add_(change, rule_.lr);
  }

  void adamax() {
    decay();
    clip();
    s_[0].mul_(rule_.beta1).add_(g_, 1 - rule_.beta1);
    s_[1].mul_(rule_.beta2);
    at::maximum_out(s_[1], s_[1], g_.abs());
    const auto change = s_[0] / s_[1];
    w_.sub_(
        at::where(s_[1].eq(0), at::zeros_like(change), change), n_.step_size);
  }

  void rmsprop() {
    decay();
    clip();
    average_square(s_[0], g_, rule_.alpha);
    if (rule_.centered) {
      s_[1].mul_(rule_.alpha).add_(g_, 1 - rule_.alpha);
      const auto variance = s_[0].addcmul(s_[1], s_[1], -1);
      s_[2]
          .mul_(rule_.momentum)
          .addcdiv_(g_, variance.add_(rule_.eps).sqrt_(), -rule_.lr);
      w_.add_(s_[2]);
    } else {
      w_.addcdiv_(g_, s_[0].add(rule_.eps).sqrt_(), -rule_.lr);
    }
    if (rule_.extra1 > 0) {
      w_.clamp_(-rule_.extra1, rule_.extra1);
    }
  }

  void ftrl() {
    if (rule_.lr == 0) {
      return;
    }
    clip();
    const auto before = s_[1].sqrt();
    const auto root = s_[1].addcmul_(g_, g_).sqrt();
    s_[0].add_(g_.sub_((root - before).mul_(w_).div_(rule_.lr)));
    const auto rest = s_[0].abs().sub_(rule_.extra1);
    const auto divisor =
        (root + rule_.extra2).div_(rule_.lr).add_(rule_.weight_decay);
    w_.copy_(
        at::where(
            rest.le(0),
            at::zeros_like(rest),
            sign_or_nan(s_[0]).neg_().mul_(rest).div_(divisor)));
  }

  void ftml() {
    if (rule_.lr == 0) {
      return;
    }
    decay();
    clip();
    at::Tensor& d = s_[0];
    average_square(s_[1], g_, rule_.beta2);
    const auto next =
        s_[1].sqrt().div_(n_.sqrt_bias2).add_(rule_.eps).mul_(n_.step_size);
    const auto moved = d.mul_(-rule_.beta1).add_(next).mul_(w_);
    s_[2].mul_(rule_.beta1).add_(g_, 1 - rule_.beta1).sub_(moved);
    d.copy_(next);
    w_.copy_(s_[2].div(next).neg_());
  }

  void dcasgd() {
    clip();
    at::Tensor change = g_.clone();
    if (rule_.weight_decay != 0) {
      change.add_(w_, rule_.weight_decay);
    }
    change.add_(g_.square_().mul_(w_ - s_[0]), rule_.extra1);
    change.mul_(-rule_.lr);
    if (s_[1].defined()) {
      change = s_[1].mul_(rule_.momentum).add_(change);
    }
    s_[0].copy_(w_);
    w_.add_(change);
  }

  // Scalars stay on the device: the host does not wait for norms.

  void lamb() {
    clip();
    s_[0].mul_(rule_.beta1).add_(g_, 1 - rule_.beta1);
    average_square(s_[1], g_, rule_.beta2);
    at::Tensor direction = rule_.correction
        ? s_[0].div(n_.bias1).div_(
              s_[1].sqrt().div_(n_.sqrt_bias2).add_(rule_.eps))
        : s_[0] / s_[1].sqrt().add_(rule_.eps);
    if (rule_.weight_decay != 0) {
      direction.add_(w_, rule_.weight_decay);
    }
    at::Tensor size = norm_of(w_);
    if (rule_.extra1 > 0) {
      size = size.clamp_min(rule_.extra1);
    }
    if (rule_.extra2 > 0) {
      size = size.clamp_max(rule_.extra2);
    }
    const at::Tensor length = norm_of(direction);
    direction.mul_(ratio_or_one(size, length, size.div(length)));
    w_.sub_(direction, rule_.lr);
  }

  // `ratio` where both norms are greater than 0.
  at::Tensor ratio_or_one(
      const at::Tensor& a,
      const at::Tensor& b,
      const at::Tensor& ratio) const {
    return at::where(a.gt(0).logical_and(b.gt(0)), ratio, at::ones_like(ratio))
        .to(w_.scalar_type());
  }

  // Rows that are not stepped have a gradient of 0, but a weight.
  at::Tensor norm_of_weight() const {
    if (rows_ == nullptr) {
      return norm_of(w_);
    }
    const at::Tensor& whole = rows_->whole;
    return norm_of(whole.is_complex() ? at::view_as_real(whole) : whole);
  }

  // `extra1` is eta; 0 if `extra2` is the ratio of the norms.
  void lars() {
    at::Tensor trust = at::full({}, rule_.extra2, w_.options());
    if (rule_.extra1 > 0) {
      const auto of_w = norm_of_weight();
      const auto of_g = norm_of(g_);
      const auto divisor =
          of_w.mul(rule_.weight_decay).add_(of_g).add_(rule_.eps);
      trust = ratio_or_one(of_w, of_g, of_w.mul(rule_.extra1).div_(divisor));
    }
    if (!rule_.correction || !s_[0].defined()) {
      return sgd(trust.mul_(rule_.lr));
    }
    if (rule_.lr == 0) {
      s_[0].zero_();
      return;
    }
    clip();
    decay();
    s_[0].mul_(rule_.momentum).sub_(g_.mul_(trust));
    w_.add_(s_[0], rule_.lr);
  }

  // The ratio of the norms, that of the gradient before it is rescaled.
  void lbsgd() {
    const auto g =
        g_.to(at::kDouble).mul(step_.scale == 0 ? 0 : 1 / step_.scale);
    const auto of_w = norm_of_weight().square_();
    const auto of_g = norm_of(g).square_();
    const auto divisor = of_w.mul(rule_.weight_decay).add_(of_g).add_(1e-18);
    sgd(of_w.div_(divisor).sqrt_().clamp_(0.01, 100).mul_(rule_.lr).to(
        w_.scalar_type()));
  }

  // One history per row: the first dimension.
  void group_adagrad() {
    clip();
    at::Tensor square = g_.square();
    if (square.dim() > 1) {
      std::vector<int64_t> others(square.dim() - 1);
      std::iota(others.begin(), others.end(), 1);
      square = square.mean(others, /*keepdim=*/true);
    }
    s_[0].add_(square);
    w_.addcdiv_(g_, s_[0].add(rule_.eps).sqrt_(), -rule_.lr);
  }

  const RuleStep& step_;
  const RuleSpec& rule_;
  const kernels::RuleNumbers<double> n_;
  at::Tensor g_;
  at::Tensor w_;
  std::array<at::Tensor, kMaxStates> s_;
  const RowsOfWeight* const rows_; // or null
};

} // namespace

void mxnet_step_with_aten(
    const RuleStep& step,
    at::Tensor gradient,
    at::Tensor weight,
    std::array<at::Tensor, kMaxStates> states,
    const RowsOfWeight* rows) {
  MxnetStep(
      step, std::move(gradient), std::move(weight), std::move(states), rows)
      .run();
}

} // namespace torchkv

#include "norm_report.h"

#include <cmath>

#include "../store/optimizer_step.h"

namespace torchkv::dist {

double NormReport::decide(const GradientSpec& gradient, double squared_norm) {
  const double factor = OptimizerStep::factor(gradient, squared_norm);
  if (factor == 0 || !std::isfinite(factor)) {
    ++num_skipped_; // the servers make no step
  } else if (gradient.accumulate == 1 || squared_norm != 0) {
    grad_norm_ = std::sqrt(squared_norm);
  }
  return factor;
}

std::optional<double> NormReport::grad_norm() const {
  const double norm = grad_norm_;
  return norm == kNone ? std::nullopt : std::optional(norm);
}

} // namespace torchkv::dist

#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "../update/optimizer.h"

namespace torchkv::dist {

// What rank 0 knows of the gradients whose norm the servers compute: it alone
// adds up their parts. Thread-safe.
class NormReport {
 public:
  // What OptimizerStep::factor returns, of a push. With
  // GradientSpec::accumulate and without max_norm, a push that makes no step
  // has a norm, too.
  double decide(const GradientSpec& gradient, double squared_norm);
  void clear_norm() {
    grad_norm_ = kNone;
  }

  // As OptimizerStep.
  int64_t num_skipped() const {
    return num_skipped_;
  }
  std::optional<double> grad_norm() const;

 private:
  static constexpr double kNone = -1;

  std::atomic<int64_t> num_skipped_{0};
  std::atomic<double> grad_norm_{kNone};
};

} // namespace torchkv::dist

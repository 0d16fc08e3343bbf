#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "../comm/reducer.h"
#include "../memory/placement.h"
#include "../memory/slices.h"
#include "../update/optimizer.h"
#include "batch.h"

namespace torchkv {

// The steps of a built-in optimizer: the only owner of steps, generations,
// accumulation and norms. A push is measured (the norm of its gradients, for
// clipping and skipping), combined (with the norms of other shares of the
// gradients) and applied. Thread-safe.
class OptimizerStep {
 public:
  // Returns the squared norm of all gradients, given that of this store's
  // share. Called without locks, once per norm. Empty: this store has all
  // gradients.
  using Combine = std::function<double(double squared_norm)>;
  // `current`: the optimizer that is set now, or null.
  OptimizerStep(
      Reducer& reducer,
      Placement& placement,
      Slices& slices,
      std::function<OptimizerPtr()> current,
      Combine combine = {})
      : reducer_(reducer),
        placement_(placement),
        slices_(slices),
        current_(std::move(current)),
        combine_(std::move(combine)) {}

  // Pushes values as gradients. Measuring and applying lock separately: another
  // thread's push to the same keys may come between them. REQUIRES: arguments
  // have been checked.
  void push(const Groups& values, const Optimizer& optimizer);

  // The two halves of a push whose gradients are measured in several stores:
  // the squared norm of this store's share, infinite or NaN where a step is to
  // be skipped; and what is done with the norm of all, a factor for the
  // gradients or 0 to make no step. Neither calls `combine`.
  double measure(const Groups& values, const Optimizer& optimizer);
  void apply(const Groups& values, const Optimizer& optimizer, double factor);
  // The factor for the sum of the shares; as torch.nn.utils.clip_grad_norm_.
  static double factor(const GradientSpec& gradient, double squared_norm);

  // Pushes that made no step because a gradient was not finite.
  int64_t num_skipped() const {
    return num_skipped_;
  }
  // The 2-norm of the gradients of the last push that made a step, if its
  // optimizer computes one.
  std::optional<double> grad_norm() const;
  void clear_norm() {
    grad_norm_ = kNoNorm;
  }
  // Takes over the counters of another store.
  void take(const OptimizerStep& other);

 private:
  struct Push;
  // The squared norm is infinite where the sum of squares is: then gradients
  // are scaled before they are squared.
  struct Norm {
    double scaled = 0;
    double scale = 1;

    double value() const;
  };
  // Of the gradients that make a step now, or `of_all`, where an infinity is
  // looked for.
  Norm measure(Push& push, double clip_value, bool of_all);
  double squared_norm(Push& push, double clip_value, bool of_all, double scale);
  double combined(double squared_norm) const;
  void apply(Push& push, bool skip, double last_scale);
  template <class Body>
  void for_each_batch(Push& push, Body body);

  static constexpr double kNoNorm = -1;

  Reducer& reducer_;
  Placement& placement_;
  Slices& slices_;
  const std::function<OptimizerPtr()> current_;
  const Combine combine_;
  std::atomic<int64_t> num_skipped_{0};
  std::atomic<double> grad_norm_{kNoNorm};
};

} // namespace torchkv

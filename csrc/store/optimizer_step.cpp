#include "optimizer_step.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "count_calls.h"
#include "locked_ranges.h"

namespace torchkv {

struct OptimizerStep::Push {
  const Groups& values;
  const Optimizer& optimizer;
  bool has_steps = false; // measured
};

std::optional<double> OptimizerStep::grad_norm() const {
  const double norm = grad_norm_;
  return norm == kNoNorm ? std::nullopt : std::optional(norm);
}

void OptimizerStep::take(const OptimizerStep& other) {
  num_skipped_ = other.num_skipped_.load();
  clear_norm();
}

double OptimizerStep::Norm::value() const {
  // The norm of many finite fp64 gradients may overflow.
  return std::isfinite(scaled)
      ? std::min(scaled / scale, std::numeric_limits<double>::max())
      : scaled;
}

template <class Body>
void OptimizerStep::for_each_batch(Push& push, Body body) {
  for_each_locked(push.values, [&](size_t begin, size_t end) {
    Batch batch(push.values, begin, end);
    placement_.place(batch.items, push.optimizer.is_elementwise());
    batch.plan(push.optimizer, current_, slices_);
    batch.find_rows();
    body(batch);
  });
}

double OptimizerStep::squared_norm(
    Push& push,
    double clip_value,
    bool of_all,
    double scale) {
  double squared = 0;
  for_each_batch(push, [&](Batch& batch) {
    const Stopwatch watch;
    if (!of_all) { // compression would hide an infinity
      batch.compress(slices_);
    }
    for (auto& step : batch.steps) {
      step.clip_value = clip_value;
    }
    squared += reducer_.squared_norm(batch.stepping, scale);
    if (of_all) {
      squared += reducer_.squared_norm(batch.accumulating, scale);
    }
    push.has_steps = push.has_steps || !batch.stepping.empty();
    add_seconds(batch.items, &KeyStats::update_seconds, watch.seconds());
  });
  return squared;
}

double OptimizerStep::combined(double squared_norm) const {
  return combine_ == nullptr ? squared_norm : combine_(squared_norm);
}

OptimizerStep::Norm OptimizerStep::measure(
    Push& push,
    double clip_value,
    bool of_all) {
  const double squared = combined(squared_norm(push, clip_value, of_all, 1));
  if (!std::isinf(squared)) {
    return {std::sqrt(squared), 1};
  }
  // Either gradients are infinite, or only their squares overflow (fp64).
  constexpr double kScale = 0x1p-600;
  const double scaled = squared_norm(push, clip_value, of_all, kScale);
  return {std::sqrt(combined(scaled)), kScale};
}

double OptimizerStep::measure(
    const Groups& values,
    const Optimizer& optimizer) {
  const GradientSpec& gradient = optimizer.gradient;
  Push push{values, optimizer};
  double squared = 0;
  if (gradient.skip_nonfinite) {
    squared = squared_norm(push, 0, /*of_all=*/true, 1);
    if (!std::isfinite(squared)) {
      return squared;
    }
  }
  const bool is_measured = gradient.skip_nonfinite &&
      gradient.clip_value == 0 && gradient.accumulate == 1;
  return gradient.max_norm == 0 || is_measured
      ? squared
      : squared_norm(push, gradient.clip_value, /*of_all=*/false, 1);
}

double OptimizerStep::factor(
    const GradientSpec& gradient,
    double squared_norm) {
  if (gradient.skip_nonfinite && !std::isfinite(squared_norm)) {
    return 0;
  }
  if (gradient.max_norm == 0) {
    return 1;
  }
  const double scale = gradient.max_norm / (std::sqrt(squared_norm) + 1e-6);
  return scale < 1 || std::isnan(scale) ? scale : 1;
}

void OptimizerStep::apply(
    const Groups& values,
    const Optimizer& optimizer,
    double factor) {
  Push push{values, optimizer};
  apply(push, /*skip=*/factor == 0, factor);
}

void OptimizerStep::push(const Groups& values, const Optimizer& optimizer) {
  const GradientSpec& gradient = optimizer.gradient;
  Push push{values, optimizer};
  double last_scale = 1;
  Norm norm;
  bool skip = false;
  if (gradient.skip_nonfinite) {
    // Clipping by value would hide an infinity.
    norm = measure(push, 0, /*of_all=*/true);
    skip = !std::isfinite(norm.scaled);
  }
  if (gradient.max_norm != 0 && !skip) {
    const bool is_measured = gradient.skip_nonfinite &&
        gradient.clip_value == 0 && gradient.accumulate == 1 &&
        values.compression() == nullptr;
    norm = is_measured ? norm
                       : measure(push, gradient.clip_value, /*of_all=*/false);
    // As torch.nn.utils.clip_grad_norm_.
    const double scale =
        gradient.max_norm * norm.scale / (norm.scaled + 1e-6 * norm.scale);
    last_scale = scale < 1 || std::isnan(scale) ? scale : 1;
  }
  if (skip) {
    ++num_skipped_;
  }
  if (push.has_steps && !skip) {
    grad_norm_ = norm.value();
  } else if (!gradient.skip_nonfinite && gradient.max_norm == 0) {
    clear_norm();
  }
  apply(push, skip, last_scale);
}

void OptimizerStep::apply(Push& push, bool skip, double last_scale) {
  for_each_batch(push, [&](Batch& batch) {
    const Stopwatch watch;
    Reducer::Items copied; // whose outs are not written yet
    if (!skip) {
      batch.compress(slices_);
      reducer_.accumulate(batch.accumulating);
      for (const auto& item : batch.accumulating) {
        ++item.entry->num_accumulated;
      }
      batch.count_compressed(batch.accumulating);
      for (auto& step : batch.steps) {
        step.last_scale *= last_scale;
      }
      for (const auto& item : batch.stepping) {
        slices_.end_leases(*item.entry);
      }
      copied = reducer_.update(batch.stepping);
      copied.append(batch.accumulating.begin(), batch.accumulating.end());
      batch.count_compressed(batch.stepping);
    }
    for (const auto& item : batch.stepping) {
      item.entry->num_accumulated = 0;
      if (!skip) {
        ++item.entry->step;
        ++item.entry->version;
      }
    }
    if (push.values.outs() != nullptr) {
      reducer_.copy_out(skip ? c10::ArrayRef<Item>(batch.items) : copied);
      count_pull(batch.items, 0);
    }
    count_push(batch, &KeyStats::update_seconds, watch.seconds());
  });
}

} // namespace torchkv

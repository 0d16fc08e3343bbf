#include "aten_backend.h"

#include <ATen/OpMathType.h>

#include <algorithm>
#include <utility>

#include "../core/plain_dispatch.h"
#include "../kernels/cuda/library.h"
#include "../memory/layout.h"
#include "../memory/slices.h"
#include "backends.h"
#include "step_with_aten.h"

namespace torchkv {

bool AtenBackend::add(const Job& job) {
  if (job.is_norm ? job.result->device().is_cpu()
                  : job.is_step() && CpuBackend::can_step(job)) {
    const Value total(&totals_.emplace_back(sum_of(job, job.values)));
    Job summed = job;
    summed.values = total;
    cpu_.add(summed);
    return true;
  }
  // No kernel takes, for example, several fp32 values for a half-precision key,
  // but one takes their sum.
  const bool may_have_kernel = (job.is_norm || job.is_step()) &&
      job.rows == nullptr && job.values.size() > 1 &&
      kernels::cuda::has_kernels(job.slice->home.device);
  if (may_have_kernel) {
    const at::Tensor& sum = totals_.emplace_back(sum_of(job, job.values));
    const Value total(&sum);
    Job summed = job;
    summed.values = total;
    if (!cuda_.add(summed)) {
      queued_.push_back({job, {}, sum});
    }
    return true;
  }
  queued_.push_back({job, {job.values.begin(), job.values.end()}, {}});
  return true;
}

bool AtenBackend::add_copy(const Slice& source, const at::Tensor& out) {
  order_.use(source.home, out.device());
  order_.sync();
  runtime_.copy(out, source.value);
  return true;
}

// A new tensor with the sum, in the accumulation type.
at::Tensor AtenBackend::sum_of(const Job& job, c10::ArrayRef<Value> values) {
  at::Tensor total = runtime_.allocate_like(*job.result, job.accumulation);
  Job sum = job;
  sum.values = values;
  sum.result = &total;
  sum.step = &kAssignStep;
  sum.is_norm = false;
  Backends backends(order_); // there may be a kernel for the sum alone
  backends.add(sum);
  backends.run();
  return total;
}

void AtenBackend::sum_into(
    c10::ArrayRef<Value> values,
    const at::Tensor& result,
    c10::ScalarType accumulation) {
  if (values.size() == 1) {
    runtime_.copy(result, *values[0].data);
    return;
  }
  const auto copied = [&](const Value& value) {
    at::Tensor copy = runtime_.allocate_like(result, accumulation);
    runtime_.copy(copy, *value.data);
    return copy;
  };
  const at::Tensor total = copied(values[0]);
  for (const auto& value : values.slice(1)) {
    const at::Tensor& data = *value.data;
    const bool is_here = data.device() == result.device() &&
        data.scalar_type() == accumulation && is_plain(data);
    const PlainDispatch plain;
    total.add_(is_here ? data : copied(value));
  }
  runtime_.copy(result, total);
}

void AtenBackend::step(const Job& job, const at::Tensor& gradient) {
  const Slice& slice = *job.slice;
  std::array<at::Tensor, kMaxStates> states;
  const auto names = state_names(job.step->rule);
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr) {
      states[i] = slice.states[i];
    }
  }
  const PlainDispatch plain;
  const bool has_master = slice.master.defined();
  if (job.follows_writes()) {
    Slices::follow_writes(slice);
  }
  step_with_aten(
      *job.step,
      gradient,
      has_master ? slice.master : *job.result,
      states,
      job.rows);
  if (has_master) {
    runtime_.copy(*job.result, slice.master);
  }
}

void AtenBackend::run() {
  for (const auto& [job, values, sum] : queued_) {
    const Place& home = job.slice->home;
    order_.enter(home);
    if (job.is_step()) {
      step(job, sum.defined() ? sum : sum_of(job, values));
      continue;
    }
    for (const auto& value : values) {
      order_.use(home, value.device());
    }
    order_.sync();
    sum_into(values, *job.result, job.accumulation);
  }
  queued_.clear();
}

double AtenBackend::squared_norm(double scale) {
  std::vector<std::pair<Place, at::Tensor>> sums; // of each home
  for (const auto& [job, values, sum_of_values] : queued_) {
    const Place& home = job.slice->home;
    order_.enter(home);
    const at::Tensor total =
        sum_of_values.defined() ? sum_of_values : sum_of(job, values);
    const PlainDispatch plain;
    const at::Tensor squared = squared_norm_with_aten(
        *job.step,
        total.to(at::toOpMathType(job.result->scalar_type())),
        scale);
    const auto sum =
        std::find_if(sums.begin(), sums.end(), [&](const auto& candidate) {
          return candidate.first == home;
        });
    if (sum == sums.end()) {
      sums.emplace_back(home, squared);
    } else {
      sum->second.add_(squared);
    }
  }
  double result = 0;
  for (const auto& [home, sum] : sums) {
    order_.enter(home);
    const PlainDispatch plain;
    result += sum.item<double>();
  }
  return result;
}

} // namespace torchkv

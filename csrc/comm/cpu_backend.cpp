#include "cpu_backend.h"

#include <algorithm>
#include <utility>

#include "../memory/layout.h"

namespace torchkv {
namespace {

bool are_plain_cpu(c10::ArrayRef<Value> values) {
  return std::all_of(values.begin(), values.end(), [](const Value& value) {
    return value.dense() != nullptr && is_plain_cpu(*value.dense());
  });
}

bool same_layout(c10::ArrayRef<Value> values, const at::Tensor& result) {
  return std::all_of(values.begin(), values.end(), [&](const Value& value) {
    return kernels::cpu::same_layout(*value.data, result);
  });
}

kernels::cpu::State state_of(const Job& job) {
  if (!job.is_step()) {
    return {};
  }
  kernels::cpu::State state{job.slice->master, {}};
  const auto names = state_names(job.step->rule);
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr) {
      state.states[i] = job.slice->states[i];
    }
  }
  return state;
}

} // namespace

// Before any sum runs: running out of memory changes nothing.
void CpuBackend::reserve_scratch(const Job& job) {
  const int64_t needed = kernels::cpu::scratch_bytes(job.values, *job.result);
  if (needed > (scratch_.defined() ? scratch_.numel() : 0)) {
    scratch_ = runtime_.allocate({needed}, {1}, c10::kByte, c10::kCPU);
  }
}

// With the memory layout of the result.
at::Tensor CpuBackend::strided_sum(const Job& job) {
  at::Tensor total = runtime_.allocate(
      job.result->sizes(),
      job.result->strides(),
      job.accumulation,
      job.result->device());
  reserve_scratch(job);
  kernels::cpu::sum_strided(
      job.values,
      total,
      job.accumulation,
      scratch_.defined() ? scratch_.mutable_data_ptr() : nullptr);
  return total;
}

bool CpuBackend::add(const Job& job) {
  if (!job.result->device().is_cpu() || !are_plain_cpu(job.values)) {
    return false;
  }
  if (same_layout(job.values, *job.result)) {
    sums_.add(
        job.values, *job.result, job.accumulation, *job.step, state_of(job));
  } else if (is_elementwise(job.step->rule)) {
    reserve_scratch(job);
    strided_.push_back({job, {job.values.begin(), job.values.end()}});
  } else {
    add_sum(job, strided_sum(job));
  }
  return true;
}

bool CpuBackend::add_norm(const Job& job) {
  if (!job.result->device().is_cpu() || !are_plain_cpu(job.values)) {
    return false;
  }
  if (same_layout(job.values, *job.result)) {
    sums_.add(job.values, *job.result, job.accumulation, *job.step);
  } else {
    add_norm_of_sum(job, strided_sum(job));
  }
  return true;
}

void CpuBackend::add_sum(const Job& job, at::Tensor sum) {
  const at::Tensor& total = totals_.emplace_back(std::move(sum));
  sums_.add(
      Value(&total),
      *job.result,
      total.scalar_type(),
      *job.step,
      state_of(job));
}

void CpuBackend::add_norm_of_sum(const Job& job, at::Tensor sum) {
  const at::Tensor& total = totals_.emplace_back(std::move(sum));
  sums_.add(Value(&total), *job.result, total.scalar_type(), *job.step);
}

bool CpuBackend::add_copy(const Slice& source, const at::Tensor& out) {
  if (!is_plain_cpu_copy(source.value, out)) {
    return false;
  }
  copies_.add(source.value, out);
  return true;
}

void CpuBackend::run() {
  for (const auto& [job, values] : strided_) {
    kernels::cpu::sum_strided(
        values,
        *job.result,
        job.accumulation,
        scratch_.defined() ? scratch_.mutable_data_ptr() : nullptr,
        *job.step,
        state_of(job));
  }
  sums_.run();
  copies_.run();
}

} // namespace torchkv

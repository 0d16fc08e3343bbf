#include "cpu_backend.h"

#include <algorithm>

#include "../memory/layout.h"

namespace torchkv {

bool CpuBackend::can_step(const Job& job) {
  return job.result->device().is_cpu() &&
      (!is_row_wise(job.step->rule) || job.result->is_contiguous());
}

bool CpuBackend::add(const Job& job) {
  const auto all = [&](auto is) {
    return std::all_of(job.values.begin(), job.values.end(), is);
  };
  const at::Tensor& result = *job.result;
  if (!result.device().is_cpu() || !all([](const Value& value) {
        return value.dense() != nullptr && is_plain_cpu(*value.dense());
      })) {
    return false;
  }
  if (!job.is_norm && !can_step(job)) {
    return false;
  }
  kernels::cpu::StateLine state;
  job.get_state(state);
  kernels::cpu::Sum sum{
      job.values, result, job.accumulation, *job.step, state, job.outs};
  if (all([&](const Value& value) {
        return same_layout(*value.data, result);
      })) {
    if (!job.is_norm && is_row_wise(job.step->rule)) {
      return add_rows(sum);
    }
    if (!is_elementwise(job.step->rule)) {
      add_copies(sum);
    }
    sums_.add(sum);
    return true;
  }
  if (job.is_norm || !is_elementwise(job.step->rule)) {
    return false;
  }
  add_copies(sum);
  strided_.add(sum);
  // Before any sum runs: running out of memory changes nothing.
  const int64_t needed = strided_.scratch_bytes();
  if (needed > (scratch_.defined() ? scratch_.numel() : 0)) {
    scratch_ = runtime_.allocate({needed}, {1}, c10::kByte, c10::kCPU);
  }
  return true;
}

// Of outs, after all sums.
void CpuBackend::add_copies(kernels::cpu::Sum& sum) {
  for (const auto& out : sum.outs) {
    copies_.add(sum.stored, out);
  }
  sum.outs = {};
}

bool CpuBackend::add_rows(kernels::cpu::Sum& sum) {
  const c10::ScalarType dtype = sum.values[0].dtype();
  c10::SmallVector<kernels::cpu::RowSource, 4> sources;
  for (const auto& value : sum.values) {
    if (value.dtype() != dtype) {
      return false;
    }
    auto& source = sources.emplace_back();
    source.data = static_cast<const char*>(value.data->const_data_ptr());
    source.is_dense = true;
  }
  add_copies(sum);
  const int64_t num_rows = sum.stored.dim() == 0 ? 1 : sum.stored.size(0);
  rows_.add(
      {sources,
       dtype,
       sum.stored.numel() / num_rows,
       /*begin=*/0,
       sum.stored,
       sum.accumulation,
       sum.step,
       sum.state});
  return true;
}

bool CpuBackend::add_copy(const Slice& source, const at::Tensor& out) {
  if (!is_plain_cpu_copy(source.value, out)) {
    return false;
  }
  copies_.add(source.value, out);
  return true;
}

void CpuBackend::run() {
  strided_.run(scratch_);
  sums_.run();
  rows_.run();
  copies_.run();
}

} // namespace torchkv

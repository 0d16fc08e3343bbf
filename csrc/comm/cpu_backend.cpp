#include "cpu_backend.h"

#include <algorithm>

#include "../memory/layout.h"

namespace torchkv {

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
  if (!job.is_norm && !has_kernel(job.step->rule)) {
    return false;
  }
  kernels::cpu::StateLine state;
  job.get_state(state.master, state.states);
  const kernels::cpu::Sum sum{
      job.values, result, job.accumulation, *job.step, state};
  if (all([&](const Value& value) {
        return same_layout(*value.data, result);
      })) {
    sums_.add(sum);
    return true;
  }
  if (job.is_norm || !is_elementwise(job.step->rule)) {
    return false;
  }
  strided_.add(sum);
  // Before any sum runs: running out of memory changes nothing.
  const int64_t needed = strided_.scratch_bytes();
  if (needed > (scratch_.defined() ? scratch_.numel() : 0)) {
    scratch_ = runtime_.allocate({needed}, {1}, c10::kByte, c10::kCPU);
  }
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
  copies_.run();
}

} // namespace torchkv

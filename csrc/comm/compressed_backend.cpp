#include "compressed_backend.h"

#include <algorithm>

#include "../core/compressed.h"
#include "../memory/layout.h"

namespace torchkv {
namespace {

const Compressed* codes_of(const Value& value) {
  return dynamic_cast<const Compressed*>(value.encoding);
}

} // namespace

bool CompressedBackend::add(const Job& job) {
  const bool is_real =
      job.accumulation == c10::kFloat || job.accumulation == c10::kDouble;
  const bool is_supported =
      is_real && job.result->device().is_cpu() &&
      std::all_of(job.values.begin(), job.values.end(), [](const Value& value) {
        return is_plain_cpu(*value.data) &&
            (value.dense() != nullptr || codes_of(value) != nullptr);
      });
  if (!is_supported) {
    return false;
  }
  if (job.is_norm || is_elementwise(job.step->rule)) {
    add_sum(job);
  } else {
    add_dense_step(job);
  }
  return true;
}

void CompressedBackend::add_sum(const Job& job) {
  int64_t first = 0;
  c10::SmallVector<kernels::cpu::CompressedSource, 4> sources;
  for (const auto& value : job.values) {
    auto& source = sources.emplace_back();
    source.data = static_cast<const char*>(value.data->const_data_ptr());
    source.dtype = value.data->scalar_type();
    const Compressed* const codes = codes_of(value);
    if (codes == nullptr) {
      continue;
    }
    first = value.begin;
    source.data += first * static_cast<int64_t>(value.data->element_size());
    source.codec = codes->codec;
    if (codes->residual.defined()) {
      source.residual = static_cast<char*>(codes->residual.mutable_data_ptr()) +
          first * static_cast<int64_t>(codes->residual.element_size());
    }
    source.stream = codes->stream;
    if (codes->largest.defined()) {
      source.largest =
          static_cast<const char*>(codes->largest.const_data_ptr());
    }
    source.least_bits = codes->least_bits;
    source.ties_end = codes->ties_end;
  }
  kernels::cpu::StateLine state;
  job.get_state(state.master, state.states);
  sums_.add({sources, first, *job.result, job.accumulation, *job.step, state});
}

} // namespace torchkv

#include "compressed_backend.h"

#include <algorithm>

#include "../core/compressed.h"
#include "../core/plain_dispatch.h"
#include "../memory/layout.h"
#include "receive.h"

namespace torchkv {
namespace {

const Compressed* compressed(const Value& value) {
  return dynamic_cast<const Compressed*>(value.encoding);
}

bool is_packed(const Value& value) {
  return dynamic_cast<const Packed*>(value.encoding) != nullptr;
}

} // namespace

bool CompressedBackend::add(const Job& job) {
  const bool is_real =
      job.accumulation == c10::kFloat || job.accumulation == c10::kDouble;
  if (is_real && is_received(job)) {
    const PlainDispatch plain;
    const at::Tensor& total =
        tensors_.emplace_back(receive(backends_.order(), job));
    const Value value(&total);
    Job summed = job;
    summed.values = value;
    backends_.add(summed);
    return true;
  }
  const bool is_supported =
      is_real && job.result->device().is_cpu() &&
      std::all_of(job.values.begin(), job.values.end(), [](const Value& value) {
        return is_plain_cpu(*value.data) &&
            (value.dense() != nullptr || compressed(value) != nullptr ||
             (is_packed(value) && value.begin == 0));
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
    if (is_packed(value)) {
      source.codes = &codes_.emplace_back(
          static_cast<const char*>(value.data->const_data_ptr()),
          value.data->numel(),
          job.result->numel());
      continue;
    }
    source.data = static_cast<const char*>(value.data->const_data_ptr());
    source.dtype = value.data->scalar_type();
    const Compressed* const sent = compressed(value);
    if (sent == nullptr) {
      continue;
    }
    first = value.begin;
    source.data += first * static_cast<int64_t>(value.data->element_size());
    source.codec = sent->codec;
    if (sent->residual.defined()) {
      source.residual = static_cast<char*>(sent->residual.mutable_data_ptr()) +
          first * static_cast<int64_t>(sent->residual.element_size());
    }
    source.stream = sent->stream;
    if (sent->largest.defined()) {
      source.largest = static_cast<const char*>(sent->largest.const_data_ptr());
    }
    source.least_bits = sent->least_bits;
    source.ties_end = sent->ties_end;
  }
  kernels::cpu::StateLine state;
  job.get_state(state);
  sums_.add({sources, first, *job.result, job.accumulation, *job.step, state});
}

} // namespace torchkv

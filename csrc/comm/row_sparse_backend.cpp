#include "row_sparse_backend.h"

#include <algorithm>

#include "../core/row_sparse.h"
#include "../memory/layout.h"
#include "../memory/row_ids.h"

namespace torchkv {

bool RowSparseBackend::add(const Job& job) {
  const bool is_supported =
      job.result->is_contiguous() &&
      std::all_of(job.values.begin(), job.values.end(), [](const Value& value) {
        return value.dense() != nullptr || rows_in(value) != nullptr;
      });
  if (!is_supported) {
    return false;
  }
  const bool is_cpu = job.result->device().is_cpu();
  const RuleSpec& rule = job.step->rule;
  const bool takes_rows = job.is_norm ||
      (job.step->is_lazy && can_step_rows(rule) &&
       (is_cpu || !is_row_wise(rule)));
  // Elsewhere, lists with dense values have kernels for the sum's step.
  const bool takes_dense = is_cpu || (!job.is_norm && !job.is_step());
  if (takes_rows && (takes_dense || has_rows_only(job.values))) {
    add_sum(job);
  } else {
    add_dense_step(job);
  }
  return true;
}

void RowSparseBackend::run() {
  EncodedBackend::run();
  device_sums_.run();
}

double RowSparseBackend::squared_norm(double scale) {
  return EncodedBackend::squared_norm(scale) + device_sums_.squared_norm(scale);
}

void RowSparseBackend::add_sum(const Job& job) {
  if (!job.result->device().is_cpu()) {
    device_sums_.add(job);
    return;
  }
  // Values of several dtypes are converted first: rows are few.
  c10::ScalarType dtype = job.values[0].dtype();
  for (const auto& value : job.values) {
    dtype = value.dtype() == dtype ? dtype : job.accumulation;
  }
  int64_t row_size = 1;
  int64_t begin = 0;
  c10::SmallVector<kernels::cpu::RowSource, 4> sources;
  for (const auto& value : job.values) {
    auto& source = sources.emplace_back();
    source.data =
        static_cast<const char*>(payload_as(value, dtype).const_data_ptr());
    source.is_dense = value.dense() != nullptr;
    if (const RowSparse* const rows = rows_in(value)) {
      bring_ids(*rows);
      source.ids = rows->ids.const_data_ptr<int64_t>();
      source.num_ids = rows->ids.numel();
      source.is_distinct = rows->is_distinct;
      if (rows->order.defined()) {
        source.order = rows->order.const_data_ptr<int64_t>();
      }
      row_size =
          c10::multiply_integers(rows->sizes.begin() + 1, rows->sizes.end());
      begin = value.begin;
    }
  }
  kernels::cpu::StateLine state;
  job.get_state(state);
  sums_.add(
      {sources,
       dtype,
       row_size,
       begin,
       *job.result,
       job.accumulation,
       *job.step,
       state});
}

// The payload, or the elements of a dense value; a copy in CPU memory where it
// has another dtype, or another memory layout than a contiguous one, or is
// elsewhere.
const at::Tensor& RowSparseBackend::payload_as(
    const Value& value,
    c10::ScalarType dtype) {
  const at::Tensor& data = *value.data;
  if (data.scalar_type() == dtype && data.is_contiguous() &&
      is_plain_cpu(data)) {
    return data;
  }
  Runtime& runtime = backends_.order().runtime();
  const at::Tensor& copy = tensors_.emplace_back(runtime.allocate(
      data.sizes(),
      at::detail::defaultStrides(data.sizes()),
      dtype,
      c10::kCPU));
  runtime.copy(copy, data);
  return copy;
}

} // namespace torchkv

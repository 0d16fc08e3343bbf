#include "device_row_sums.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../core/row_sparse.h"
#include "../kernels/cuda/library.h"
#include "../memory/layout.h"
#include "backends.h"
#include "cuda_dtype.h"
#include "step_with_aten.h"
#include "summed_rows.h"

namespace torchkv {
namespace {

// The values of a list with dense ones, in the accumulation type.
at::Tensor dense_sum(
    StreamOrder& order,
    const Job& job,
    c10::ArrayRef<RowPiece> pieces) {
  Runtime& runtime = order.runtime();
  at::Tensor total = runtime.allocate_like(*job.result, job.accumulation);
  total = neutral(total.zero_()); // a dense value writes all
  for (auto values = job.values; !values.empty();) {
    const auto* const sparse_end =
        std::find_if(values.begin(), values.end(), [](const Value& value) {
          return rows_in(value) == nullptr;
        });
    const auto num_sparse = static_cast<size_t>(sparse_end - values.begin());
    if (num_sparse == 0) {
      total.add_(
          runtime.moved(*values[0].data, total.device(), job.accumulation));
      values = values.slice(1);
      continue;
    }
    for (const auto& piece : pieces) {
      add_rows_of(
          order, job.slice->home, values.slice(0, num_sparse), piece, total);
    }
    values = values.slice(num_sparse);
  }
  return total;
}

// Whether a kernel steps rows of `stored` with values of `dtype`.
bool has_step(c10::ScalarType dtype, c10::ScalarType stored) {
  const auto value = cuda_dtype(dtype);
  const auto of_weight = cuda_dtype(stored);
  return value && of_weight && !c10::isComplexType(stored) &&
      kernels::cuda::steps_rows(*value, *of_weight);
}

c10::SmallVector<RowPiece, 3> pieces_of(
    const Job& job,
    c10::ArrayRef<Value> values) {
  const auto* const encoded =
      std::find_if(values.begin(), values.end(), [](const Value& value) {
        return rows_in(value) != nullptr;
      });
  const int64_t begin = encoded->begin;
  return row_pieces(
      begin, begin + job.result->numel(), row_size_of(*rows_in(*encoded)));
}

} // namespace

void DeviceRowSums::add(const Job& job) {
  Runtime& runtime = order_.runtime();
  const Place& home = job.slice->home;
  for (const auto& value : job.values) {
    order_.use(home, value.device());
  }
  order_.sync();
  const PlainDispatch plain;
  const auto pieces = pieces_of(job, job.values);
  Queued queued;
  queued.home = home;
  queued.result = *job.result;
  if (!has_rows_only(job.values)) {
    queued.total = runtime.moved(
        dense_sum(order_, job, pieces),
        job.result->device(),
        job.result->scalar_type());
    queued_.push_back(std::move(queued));
    return;
  }
  queued.clears = !job.is_step();
  for (const auto& piece : pieces) {
    if (job.is_step()) {
      if (!add_kernel_step(job, piece, queued)) {
        add_step(job, piece, queued);
      }
      continue;
    }
    const auto [ids, sums] =
        sum_rows_of(order_, home, job.values, piece, job.accumulation);
    if (job.is_norm) {
      Norm& norm = norms_.emplace_back();
      norm.job = job;
      norm.job.values = {};
      norm.sums = sums;
      norm.like_result = at::empty_like(sums, job.result->options().dtype());
    } else {
      queued.rows.push_back(
          {*job.result, piece, ids, sums.to(job.result->scalar_type())});
    }
  }
  if (!job.is_norm) {
    queued_.push_back(std::move(queued));
  }
}

bool DeviceRowSums::add_kernel_step(
    const Job& job,
    const RowPiece& piece,
    Queued& queued) {
  const at::Tensor& result = *job.result;
  const c10::ScalarType stored = result.scalar_type();
  if (needs_gradient_norm(job.step->rule)) {
    return false;
  }
  auto dtype = dtype_to_read(job.slice->home, job.values, job.accumulation);
  if (dtype && !has_step(*dtype, stored)) {
    dtype = job.accumulation;
  }
  if (!dtype || !has_step(*dtype, stored)) {
    return false;
  }
  KernelStep step;
  step.sources = row_sources_of(
      order_.runtime(), job.slice->home, job.values, piece, *dtype);
  if (step.sources.call.num_rows == 0) {
    return true;
  }
  auto& call = step.call;
  call = {};
  call.gradients = step.sources.call;
  const auto of_weight = cuda_dtype(stored);
  TORCHKV_INTERNAL_ASSERT(of_weight.has_value());
  call.stored = *of_weight;
  call.step = job.step;
  call.rows = step.sources.ids.const_data_ptr<int64_t>();
  call.memory = result.mutable_data_ptr();
  job.get_state(call);
  call.begin = piece.begin;
  // Where the piece begins, of tensors whose elements have this size.
  const auto move = [&](void*& memory, size_t size) {
    if (memory != nullptr) {
      memory =
          static_cast<char*>(memory) + piece.begin * static_cast<int64_t>(size);
    }
    call.gradients.is_aligned =
        call.gradients.is_aligned && kernels::cuda::is_aligned(memory);
  };
  move(call.memory, c10::elementSize(stored));
  const size_t size = c10::elementSize(at::toOpMathType(stored));
  move(call.master, size);
  for (auto& state : call.states) {
    move(state, size);
  }
  queued.steps.push_back(std::move(step));
  return true;
}

void DeviceRowSums::add_step(
    const Job& job,
    const RowPiece& piece,
    Queued& queued) {
  const SummedRows summed =
      sum_rows_of(order_, job.slice->home, job.values, piece, job.accumulation);
  const at::Tensor& ids = summed.ids;
  if (ids.numel() == 0) {
    return;
  }
  const auto copy = [&](const at::Tensor& whole) {
    return as_movable(piece_of(whole, piece))
        .index_select(0, ids)
        .view(whole.scalar_type());
  };
  const Slice& slice = *job.slice;
  Slice rows;
  rows.home = slice.home;
  rows.value = copy(*job.result);
  queued.rows.push_back({*job.result, piece, ids, rows.value});
  if (slice.master.defined()) {
    rows.master = copy(slice.master);
    queued.rows.push_back({slice.master, piece, ids, rows.master});
  }
  const auto names = state_names(job.step->rule);
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr) {
      rows.states[i] = copy(slice.states[i]);
      queued.rows.push_back({slice.states[i], piece, ids, rows.states[i]});
    }
  }
  const Value value(&summed.sums);
  // Rows of other pieces have other random numbers.
  RuleStep shifted = *job.step;
  shifted.stream += num_numbers(piece.begin, job.result->scalar_type());
  const RowsOfWeight of_weight{
      slice.master.defined() ? slice.master : *job.result, ids};
  Job step = job;
  if (is_random(shifted.rule) || needs_gradient_norm(shifted.rule)) {
    step.rows = &of_weight;
  }
  step.step = &shifted;
  step.slice = &rows;
  step.values = value;
  step.result = &rows.value;
  Backends backends(order_);
  backends.add(step);
  backends.run();
}

void DeviceRowSums::run() {
  for (auto& queued : queued_) {
    order_.enter(queued.home);
    const PlainDispatch plain;
    if (queued.total.defined()) {
      order_.runtime().copy(queued.result, queued.total);
    }
    if (queued.clears) {
      queued.result.zero_();
    }
    for (const auto& [whole, piece, ids, rows] : queued.rows) {
      as_movable(piece_of(whole, piece)).index_copy_(0, ids, as_movable(rows));
    }
    for (const auto& step : queued.steps) {
      kernels::cuda::check(
          kernels::cuda::table()->launch_row_steps(
              step.call, order_.stream(queued.home).native_handle()));
    }
  }
  queued_.clear();
}

double DeviceRowSums::squared_norm(double scale) {
  run();
  Backends backends(order_);
  for (const auto& norm : norms_) {
    if (norm.sums.numel() == 0) {
      continue;
    }
    order_.enter(norm.job.slice->home);
    const Value value(&norm.sums);
    Job job = norm.job;
    job.values = value;
    job.result = &norm.like_result;
    backends.add(job);
  }
  return backends.squared_norm(scale);
}

} // namespace torchkv

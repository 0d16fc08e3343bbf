#include "aten_row_sums.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "../core/plain_dispatch.h"
#include "../core/row_sparse.h"
#include "../memory/layout.h"
#include "../memory/row_pieces.h"
#include "norms_by_place.h"
#include "step_with_aten.h"

namespace torchkv {
namespace {

int64_t row_size_of(const RowSparse& rows) {
  return c10::multiply_integers(rows.sizes.begin() + 1, rows.sizes.end());
}

// Which of a value's rows, in the order of their ids, are those of a piece.
struct RowRange {
  RowRange(const RowSparse& rows, const RowPiece& piece) {
    const auto* const ids = rows.ids.const_data_ptr<int64_t>();
    const auto* const last = ids + rows.ids.numel();
    const auto* const from = std::lower_bound(ids, last, piece.first_row);
    const auto* const to =
        std::lower_bound(from, last, piece.first_row + piece.num_rows);
    begin = from - ids;
    of = c10::ArrayRef<int64_t>(from, to);
    is_distinct = std::adjacent_find(from, to) == to;
  }

  int64_t begin = 0;
  c10::ArrayRef<int64_t> of; // the ids
  bool is_distinct = true;
};

// Its columns of a piece, in the order of the ids, of this dtype on this
// device; possibly the payload itself.
at::Tensor payload_of(
    const Value& value,
    const RowSparse& rows,
    const RowRange& range,
    const RowPiece& piece,
    c10::Device device,
    c10::ScalarType dtype) {
  const auto count = static_cast<int64_t>(range.of.size());
  const at::Tensor whole =
      value.data->view({rows.ids.numel(), row_size_of(rows)});
  const at::Tensor own = rows.order.defined()
      ? as_movable(whole)
            .index_select(
                0, rows.order.narrow(0, range.begin, count).to(whole.device()))
            .view(whole.scalar_type())
      : whole.narrow(0, range.begin, count);
  return own.narrow(1, piece.first_column, piece.num_columns)
      .to(at::TensorOptions(device).dtype(dtype));
}

at::Tensor to_device(const std::vector<int64_t>& numbers, c10::Device device) {
  const at::Tensor tensor = at::empty(
      {static_cast<int64_t>(numbers.size())},
      at::TensorOptions(c10::kCPU).dtype(c10::kLong));
  std::copy(numbers.begin(), numbers.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor.to(device);
}

// total[at[i]] += rows[i], in order.
void add_rows(
    const at::Tensor& total,
    const std::vector<int64_t>& at,
    const at::Tensor& rows,
    bool is_distinct) {
  const at::Tensor index = to_device(at, total.device());
  if (is_distinct) {
    total.index_add_(0, index, rows);
  } else {
    // CUDA's is in the order of the rows; its index_add_ uses atomics.
    total.index_put_({index}, rows, /*accumulate=*/true);
  }
}

// The rows of a piece that row-sparse values have, and their sums.
struct SummedRows {
  at::Tensor ids; // among the piece's rows
  at::Tensor sums; // (ids, columns)
};

SummedRows sum_rows_of(
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::Device device,
    c10::ScalarType accumulation) {
  c10::SmallVector<RowRange, 4> ranges;
  std::vector<int64_t> ids;
  for (const auto& value : values) {
    const RowRange& range = ranges.emplace_back(*rows_in(value), piece);
    ids.insert(ids.end(), range.of.begin(), range.of.end());
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  at::Tensor sums;
  for (size_t i = 0; i < values.size(); ++i) {
    const RowRange& range = ranges[i];
    const at::Tensor rows = payload_of(
        values[i], *rows_in(values[i]), range, piece, device, accumulation);
    if (i == 0 && range.is_distinct && range.of.size() == ids.size()) {
      sums = rows.is_alias_of(*values[i].data) ? rows.clone() : rows;
      continue;
    }
    if (i == 0) {
      sums = at::zeros(
          {static_cast<int64_t>(ids.size()), piece.num_columns},
          rows.options());
    }
    std::vector<int64_t> at;
    at.reserve(range.of.size());
    for (const int64_t id : range.of) {
      at.push_back(std::lower_bound(ids.begin(), ids.end(), id) - ids.begin());
    }
    add_rows(sums, at, rows, range.is_distinct);
  }
  for (int64_t& id : ids) {
    id -= piece.first_row;
  }
  return {to_device(ids, device), sums};
}

void write_rows_of(
    const at::Tensor& whole,
    const RowPiece& piece,
    const at::Tensor& ids,
    const at::Tensor& rows) {
  as_movable(piece_of(whole, piece))
      .index_copy_(0, ids, as_movable(rows.to(whole.scalar_type())));
}

// The values of a list with dense ones, in the accumulation type.
at::Tensor dense_sum(
    Runtime& runtime,
    const Job& job,
    c10::ArrayRef<Value> values,
    c10::ArrayRef<RowPiece> pieces) {
  at::Tensor total = runtime.allocate_like(*job.result, job.accumulation);
  total.zero_();
  for (const auto& value : values) {
    const RowSparse* const rows = rows_in(value);
    if (rows == nullptr) {
      const at::Tensor copy =
          runtime.allocate_like(*job.result, job.accumulation);
      runtime.copy(copy, *value.data);
      total.add_(copy);
      continue;
    }
    for (const auto& piece : pieces) {
      const RowRange range(*rows, piece);
      std::vector<int64_t> at(range.of.begin(), range.of.end());
      for (int64_t& id : at) {
        id -= piece.first_row;
      }
      const at::Tensor payload = payload_of(
          value, *rows, range, piece, total.device(), job.accumulation);
      add_rows(piece_of(total, piece), at, payload, range.is_distinct);
    }
  }
  return total;
}

void step_rows(
    const Job& job,
    c10::ArrayRef<Value> values,
    const RowPiece& piece) {
  const auto [ids, sums] =
      sum_rows_of(values, piece, job.result->device(), job.accumulation);
  if (ids.numel() == 0) {
    return;
  }
  const Slice& slice = *job.slice;
  const bool has_master = slice.master.defined();
  const at::Tensor& weights = has_master ? slice.master : *job.result;
  const at::Tensor weight = piece_of(weights, piece).index_select(0, ids);
  const auto names = state_names(job.step->rule);
  std::array<at::Tensor, kMaxStates> states;
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr) {
      states[i] = piece_of(slice.states[i], piece).index_select(0, ids);
    }
  }
  step_with_aten(*job.step, sums, weight, states);
  write_rows_of(weights, piece, ids, weight);
  if (has_master) {
    write_rows_of(*job.result, piece, ids, weight);
  }
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr) {
      write_rows_of(slice.states[i], piece, ids, states[i]);
    }
  }
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

void AtenRowSums::add(const Job& job) {
  queued_.push_back({job, {job.values.begin(), job.values.end()}});
}

void AtenRowSums::enter(const Queued& queued) {
  const Place& home = queued.job.slice->home;
  order_.enter(home);
  for (const auto& value : queued.values) {
    order_.use(home, value.device());
  }
  order_.sync();
}

void AtenRowSums::run() {
  for (const auto& queued : queued_) {
    const Job& job = queued.job;
    if (job.is_norm) {
      continue;
    }
    enter(queued);
    const PlainDispatch plain;
    const auto pieces = pieces_of(job, queued.values);
    if (job.is_step()) {
      for (const auto& piece : pieces) {
        step_rows(job, queued.values, piece);
      }
    } else if (!has_rows_only(queued.values)) {
      Runtime& runtime = order_.runtime();
      runtime.copy(*job.result, dense_sum(runtime, job, queued.values, pieces));
    } else {
      at::Tensor result = *job.result;
      result.zero_();
      for (const auto& piece : pieces) {
        const auto [ids, sums] = sum_rows_of(
            queued.values, piece, result.device(), job.accumulation);
        write_rows_of(result, piece, ids, sums);
      }
    }
  }
}

double AtenRowSums::squared_norm(double scale) {
  run();
  NormsByPlace norms(order_);
  for (const auto& queued : queued_) {
    const Job& job = queued.job;
    if (!job.is_norm) {
      continue;
    }
    enter(queued);
    const PlainDispatch plain;
    for (const auto& piece : pieces_of(job, queued.values)) {
      const auto [ids, sums] = sum_rows_of(
          queued.values, piece, job.result->device(), job.accumulation);
      norms.add(
          job.slice->home,
          squared_norm_with_aten(
              *job.step,
              sums.to(at::toOpMathType(job.result->scalar_type())),
              scale));
    }
  }
  return norms.total();
}

} // namespace torchkv

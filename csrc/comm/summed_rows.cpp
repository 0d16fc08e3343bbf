#include "summed_rows.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "../kernels/cuda/library.h"
#include "row_sources.h"

namespace torchkv {
namespace {

// total[at[i]] += rows[i], by PyTorch's operators. `at` is ascending.
void add_rows(
    Runtime& runtime,
    const at::Tensor& total,
    const std::vector<int64_t>& at,
    const at::Tensor& rows) {
  // Its kernel for short rows adds up those of one id first, and by a tree
  // where there are many.
  constexpr int64_t kShort = 32;
  constexpr int64_t kMany = 32;
  // The numbers of the rows that are the first, second, ... of their id.
  std::vector<std::vector<int64_t>> rounds(1);
  int64_t nth = 0;
  for (size_t i = 0; i < at.size(); ++i) {
    nth = i != 0 && at[i] == at[i - 1] ? nth + 1 : 0;
    const auto round = static_cast<size_t>(std::min(nth, kMany));
    rounds.resize(std::max(rounds.size(), round + 1));
    rounds[round].push_back(static_cast<int64_t>(i));
  }
  const c10::Device device = total.device();
  if (rounds.size() > 1 &&
      (rows.size(1) > kShort || rounds.size() > size_t{kMany})) {
    total.index_put_(
        {to_device(runtime, at, device)}, rows, /*accumulate=*/true);
    return;
  }
  for (const auto& round : rounds) {
    std::vector<int64_t> of_round;
    of_round.reserve(round.size());
    for (const int64_t i : round) {
      of_round.push_back(at[static_cast<size_t>(i)]);
    }
    // Not index_add_, whose atomic operations flush subnormal numbers.
    const at::Tensor index = to_device(runtime, of_round, device);
    const at::Tensor own = rounds.size() == 1
        ? rows
        : rows.index_select(0, to_device(runtime, round, device));
    total.index_copy_(0, index, total.index_select(0, index).add_(own));
  }
}

void launch(
    StreamOrder& order,
    const Place& home,
    const kernels::cuda::RowSums& call) {
  kernels::cuda::check(
      kernels::cuda::table()->launch_row_sums(
          call, order.stream(home).native_handle()));
}

at::Tensor sum_with_kernel(
    StreamOrder& order,
    const Place& home,
    const RowSources& sources,
    c10::ScalarType accumulation,
    int64_t num_columns) {
  at::Tensor sums = order.runtime().allocate(
      {sources.ids.numel(), num_columns},
      {num_columns, 1},
      accumulation,
      home.device);
  kernels::cuda::RowSums call = sources.call;
  call.sums = sums.mutable_data_ptr();
  launch(order, home, call);
  return sums;
}

// These rows of the value, as rows of the piece.
std::vector<int64_t> rows_of_piece(
    c10::ArrayRef<int64_t> ids,
    const RowPiece& piece) {
  std::vector<int64_t> rows(ids.begin(), ids.end());
  for (int64_t& row : rows) {
    row -= piece.first_row;
  }
  return rows;
}

at::Tensor sum_with_aten(
    Runtime& runtime,
    c10::Device device,
    c10::ArrayRef<Value> values,
    const MergedRows& merged,
    c10::ScalarType accumulation) {
  at::Tensor sums;
  for (size_t i = 0; i < values.size(); ++i) {
    const RowRange& range = merged.ranges[i];
    const at::Tensor rows = payload_of(
        runtime, values[i], range, merged.piece, device, accumulation);
    if (i == 0 && range.is_distinct && range.of.size() == merged.ids.size()) {
      sums = rows.is_alias_of(*values[i].data) ? rows.clone() : rows;
      continue;
    }
    if (i == 0) {
      sums = neutral(
          at::zeros(
              {static_cast<int64_t>(merged.ids.size()),
               merged.piece.num_columns},
              rows.options()));
    }
    add_rows(runtime, sums, positions_of(range.of, merged.ids), rows);
  }
  return sums;
}

} // namespace

at::Tensor neutral(const at::Tensor& zeros) {
  const bool has_sign = c10::isFloatingType(zeros.scalar_type()) ||
      c10::isComplexType(zeros.scalar_type());
  return has_sign ? zeros.neg_() : zeros;
}

SummedRows sum_rows_of(
    StreamOrder& order,
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::ScalarType accumulation) {
  Runtime& runtime = order.runtime();
  SummedRows result;
  const auto dtype = dtype_to_read(home, values, accumulation);
  if (dtype && piece.num_columns != 0) {
    const RowSources sources =
        row_sources_of(runtime, home, values, piece, *dtype);
    if (sources.call.num_rows != 0) {
      result.ids = sources.ids;
      result.sums = sum_with_kernel(
          order, home, sources, accumulation, piece.num_columns);
      return result;
    }
  }
  const MergedRows rows(values, piece);
  result.sums = sum_with_aten(runtime, home.device, values, rows, accumulation);
  result.ids = to_device(runtime, rows_of_piece(rows.ids, piece), home.device);
  return result;
}

void add_rows_of(
    StreamOrder& order,
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    const at::Tensor& total) {
  Runtime& runtime = order.runtime();
  const c10::ScalarType accumulation = total.scalar_type();
  const at::Tensor rows = piece_of(total, piece);
  const auto dtype = dtype_to_read(home, values, accumulation);
  if (dtype && piece.num_columns != 0) {
    const RowSources sources =
        row_sources_of(runtime, home, values, piece, *dtype);
    kernels::cuda::RowSums call = sources.call;
    if (call.num_rows == 0) {
      return;
    }
    call.sums = rows.mutable_data_ptr();
    call.added_to = sources.ids.const_data_ptr<int64_t>();
    call.is_aligned = call.is_aligned && kernels::cuda::is_aligned(call.sums);
    launch(order, home, call);
    return;
  }
  for (const auto& value : values) {
    const RowRange range(*rows_in(value), piece);
    add_rows(
        runtime,
        rows,
        rows_of_piece(range.of, piece),
        payload_of(runtime, value, range, piece, home.device, accumulation));
  }
}

} // namespace torchkv

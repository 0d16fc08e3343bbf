#include "aten_row_sums.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "../core/plain_dispatch.h"
#include "../core/row_sparse.h"
#include "../memory/layout.h"
#include "backends.h"

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
    Runtime& runtime,
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
  return runtime.moved(
      own.narrow(1, piece.first_column, piece.num_columns), device, dtype);
}

at::Tensor to_device(const std::vector<int64_t>& numbers, c10::Device device) {
  const at::Tensor tensor = at::empty(
      {static_cast<int64_t>(numbers.size())},
      at::TensorOptions(c10::kCPU).dtype(c10::kLong));
  std::copy(numbers.begin(), numbers.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor.to(device);
}

// total[at[i]] += rows[i], in order; `at` is ascending.
void add_rows(
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
    total.index_put_({to_device(at, device)}, rows, /*accumulate=*/true);
    return;
  }
  for (const auto& round : rounds) {
    std::vector<int64_t> of_round;
    of_round.reserve(round.size());
    for (const int64_t i : round) {
      of_round.push_back(at[static_cast<size_t>(i)]);
    }
    // Not index_add_, whose atomic operations flush subnormal numbers.
    const at::Tensor index = to_device(of_round, device);
    const at::Tensor own = rounds.size() == 1
        ? rows
        : rows.index_select(0, to_device(round, device));
    total.index_copy_(0, index, total.index_select(0, index).add_(own));
  }
}

// -0, to which any number can be added.
at::Tensor neutral(const at::Tensor& zeros) {
  const bool has_sign = c10::isFloatingType(zeros.scalar_type()) ||
      c10::isComplexType(zeros.scalar_type());
  return has_sign ? zeros.neg_() : zeros;
}

// The rows of a piece that row-sparse values have, and their sums.
struct SummedRows {
  at::Tensor ids; // among the piece's rows
  at::Tensor sums; // (ids, columns)
};

SummedRows sum_rows_of(
    Runtime& runtime,
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
        runtime,
        values[i],
        *rows_in(values[i]),
        range,
        piece,
        device,
        accumulation);
    if (i == 0 && range.is_distinct && range.of.size() == ids.size()) {
      sums = rows.is_alias_of(*values[i].data) ? rows.clone() : rows;
      continue;
    }
    if (i == 0) {
      sums = neutral(
          at::zeros(
              {static_cast<int64_t>(ids.size()), piece.num_columns},
              rows.options()));
    }
    std::vector<int64_t> at;
    at.reserve(range.of.size());
    for (const int64_t id : range.of) {
      at.push_back(std::lower_bound(ids.begin(), ids.end(), id) - ids.begin());
    }
    add_rows(sums, at, rows);
  }
  for (int64_t& id : ids) {
    id -= piece.first_row;
  }
  return {to_device(ids, device), sums};
}

// The values of a list with dense ones, in the accumulation type.
at::Tensor dense_sum(
    Runtime& runtime,
    const Job& job,
    c10::ArrayRef<Value> values,
    c10::ArrayRef<RowPiece> pieces) {
  at::Tensor total = runtime.allocate_like(*job.result, job.accumulation);
  total = neutral(total.zero_()); // a dense value writes all
  for (const auto& value : values) {
    const RowSparse* const rows = rows_in(value);
    if (rows == nullptr) {
      total.add_(runtime.moved(*value.data, total.device(), job.accumulation));
      continue;
    }
    for (const auto& piece : pieces) {
      const RowRange range(*rows, piece);
      std::vector<int64_t> at(range.of.begin(), range.of.end());
      for (int64_t& id : at) {
        id -= piece.first_row;
      }
      const at::Tensor payload = payload_of(
          runtime,
          value,
          *rows,
          range,
          piece,
          total.device(),
          job.accumulation);
      add_rows(piece_of(total, piece), at, payload);
    }
  }
  return total;
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
        dense_sum(runtime, job, job.values, pieces),
        job.result->device(),
        job.result->scalar_type());
    queued_.push_back(std::move(queued));
    return;
  }
  queued.clears = !job.is_step();
  for (const auto& piece : pieces) {
    const auto [ids, sums] = sum_rows_of(
        runtime, job.values, piece, job.result->device(), job.accumulation);
    if (job.is_norm) {
      Norm& norm = norms_.emplace_back();
      norm.job = job;
      norm.job.values = {};
      norm.sums = sums;
      norm.like_result = at::empty_like(sums, job.result->options().dtype());
    } else if (job.is_step()) {
      add_step(job, piece, ids, sums, queued);
    } else {
      queued.rows.push_back(
          {*job.result, piece, ids, sums.to(job.result->scalar_type())});
    }
  }
  if (!job.is_norm) {
    queued_.push_back(std::move(queued));
  }
}

// Steps copies of the rows.
void AtenRowSums::add_step(
    const Job& job,
    const RowPiece& piece,
    const at::Tensor& ids,
    const at::Tensor& sums,
    Queued& queued) {
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
  const Value value(&sums);
  Job step = job;
  step.slice = &rows;
  step.values = value;
  step.result = &rows.value;
  Backends backends(order_);
  backends.add(step);
  backends.run();
}

void AtenRowSums::run() {
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
  }
  queued_.clear();
}

double AtenRowSums::squared_norm(double scale) {
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

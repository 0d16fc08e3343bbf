#include "summed_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "../kernels/cuda/library.h"
#include "cuda_dtype.h"

namespace torchkv {
namespace {

at::Tensor to_device(const std::vector<int64_t>& numbers, c10::Device device) {
  const at::Tensor tensor = at::empty(
      {static_cast<int64_t>(numbers.size())},
      at::TensorOptions(c10::kCPU).dtype(c10::kLong));
  std::copy(numbers.begin(), numbers.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor.to(device);
}

// The rows of which a kernel makes each sum.
struct Sources {
  c10::ScalarType dtype = c10::kFloat;
  std::vector<int64_t> offsets; // of each sum, and their end
  std::vector<int64_t> addresses;
  std::vector<at::Tensor> copies; // of what cannot be read where it is
};

bool can_read(
    Runtime& runtime,
    const Place& home,
    const Value& value,
    c10::ScalarType dtype) {
  const c10::Device device = value.device();
  return value.dtype() == dtype && device.is_cuda() &&
      (device == home.device || may_use_peer(runtime, home.device, device));
}

// Adds the rows of a value to the sources of the ids, of which `next` has the
// position of the next one.
void add_sources(
    Runtime& runtime,
    const Place& home,
    const Value& value,
    const RowRange& range,
    const RowPiece& piece,
    c10::ArrayRef<int64_t> ids,
    std::vector<int64_t>& next,
    Sources& sources) {
  const RowSparse& rows = *rows_in(value);
  const bool reads_payload = can_read(runtime, home, value, sources.dtype);
  const int64_t* order = nullptr;
  const at::Tensor* payload = value.data;
  int64_t row_size = row_size_of(rows);
  int64_t first = range.begin;
  int64_t first_column = piece.first_column;
  if (!reads_payload) {
    sources.copies.push_back(
        payload_of(runtime, value, range, piece, home.device, sources.dtype)
            .contiguous());
    payload = &sources.copies.back();
    row_size = piece.num_columns;
    first = first_column = 0;
  } else if (rows.order.defined()) {
    order = rows.order.const_data_ptr<int64_t>();
  }
  const auto size = static_cast<int64_t>(c10::elementSize(sources.dtype));
  const auto begin = reinterpret_cast<int64_t>(payload->const_data_ptr()) +
      first_column * size;
  for (size_t i = 0; i < range.of.size(); ++i) {
    const auto id = std::lower_bound(ids.begin(), ids.end(), range.of[i]);
    const int64_t at = first + static_cast<int64_t>(i);
    const int64_t row = order == nullptr ? at : order[at];
    const int64_t place = next[static_cast<size_t>(id - ids.begin())]++;
    sources.addresses[static_cast<size_t>(place)] =
        begin + row * row_size * size;
  }
}

// The dtype in which a kernel reads all values, if there is one.
std::optional<c10::ScalarType> dtype_to_read(
    const Place& home,
    c10::ArrayRef<Value> values,
    c10::ScalarType accumulation) {
  if (!home.device.is_cuda() || !cuda_dtype(accumulation) ||
      !kernels::cuda::has_kernels(home.device)) {
    return std::nullopt;
  }
  const c10::ScalarType dtype = values[0].dtype();
  const bool is_common =
      std::all_of(values.begin(), values.end(), [&](const Value& value) {
        return value.dtype() == dtype;
      });
  return is_common && cuda_dtype(dtype) && sum_type(dtype) == accumulation
      ? dtype
      : accumulation;
}

at::Tensor sum_with_kernel(
    StreamOrder& order,
    const Place& home,
    c10::ArrayRef<Value> values,
    c10::ArrayRef<RowRange> ranges,
    const RowPiece& piece,
    c10::ArrayRef<int64_t> ids,
    c10::ScalarType dtype,
    c10::ScalarType accumulation) {
  Runtime& runtime = order.runtime();
  const auto count = static_cast<int64_t>(ids.size());
  at::Tensor sums = runtime.allocate(
      {count, piece.num_columns},
      {piece.num_columns, 1},
      accumulation,
      home.device);
  if (sums.numel() == 0) {
    return sums;
  }
  Sources sources;
  sources.dtype = dtype;
  sources.offsets.resize(ids.size() + 1);
  for (const auto& range : ranges) {
    for (const int64_t id : range.of) {
      const auto at = std::lower_bound(ids.begin(), ids.end(), id);
      ++sources.offsets[static_cast<size_t>(at - ids.begin()) + 1];
    }
  }
  std::partial_sum(
      sources.offsets.begin(), sources.offsets.end(), sources.offsets.begin());
  sources.addresses.resize(static_cast<size_t>(sources.offsets.back()));
  std::vector<int64_t> next = sources.offsets;
  for (size_t i = 0; i < values.size(); ++i) {
    add_sources(runtime, home, values[i], ranges[i], piece, ids, next, sources);
  }
  const int64_t bits = std::accumulate(
      sources.addresses.begin(),
      sources.addresses.end(),
      piece.num_columns * static_cast<int64_t>(c10::elementSize(dtype)),
      std::bit_or<>());
  const at::Tensor addresses = to_device(sources.addresses, home.device);
  const at::Tensor offsets = to_device(sources.offsets, home.device);
  kernels::cuda::RowSums call{};
  call.value = cuda_dtype(dtype).value_or(kernels::cuda::Dtype::kFloat);
  call.is_aligned = bits % 16 == 0;
  call.num_rows = count;
  call.num_columns = piece.num_columns * (c10::isComplexType(dtype) ? 2 : 1);
  call.sources = static_cast<const void* const*>(addresses.const_data_ptr());
  call.offsets = offsets.const_data_ptr<int64_t>();
  call.sums = sums.mutable_data_ptr();
  kernels::cuda::check(
      kernels::cuda::table()->launch_row_sums(
          call, order.stream(home).native_handle()));
  return sums;
}

at::Tensor sum_with_aten(
    Runtime& runtime,
    c10::Device device,
    c10::ArrayRef<Value> values,
    c10::ArrayRef<RowRange> ranges,
    const RowPiece& piece,
    c10::ArrayRef<int64_t> ids,
    c10::ScalarType accumulation) {
  at::Tensor sums;
  for (size_t i = 0; i < values.size(); ++i) {
    const RowRange& range = ranges[i];
    const at::Tensor rows =
        payload_of(runtime, values[i], range, piece, device, accumulation);
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
  return sums;
}

} // namespace

int64_t row_size_of(const RowSparse& rows) {
  return c10::multiply_integers(rows.sizes.begin() + 1, rows.sizes.end());
}

RowRange::RowRange(const RowSparse& rows, const RowPiece& piece) {
  const auto* const ids = rows.ids.const_data_ptr<int64_t>();
  const auto* const last = ids + rows.ids.numel();
  const auto* const from = std::lower_bound(ids, last, piece.first_row);
  const auto* const to =
      std::lower_bound(from, last, piece.first_row + piece.num_rows);
  begin = from - ids;
  of = c10::ArrayRef<int64_t>(from, to);
  is_distinct = std::adjacent_find(from, to) == to;
}

at::Tensor payload_of(
    Runtime& runtime,
    const Value& value,
    const RowRange& range,
    const RowPiece& piece,
    c10::Device device,
    c10::ScalarType dtype) {
  const RowSparse& rows = *rows_in(value);
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
  c10::SmallVector<RowRange, 4> ranges;
  std::vector<int64_t> ids;
  for (const auto& value : values) {
    const RowRange& range = ranges.emplace_back(*rows_in(value), piece);
    ids.insert(ids.end(), range.of.begin(), range.of.end());
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  const auto dtype = dtype_to_read(home, values, accumulation);
  SummedRows result;
  result.sums = dtype
      ? sum_with_kernel(
            order, home, values, ranges, piece, ids, *dtype, accumulation)
      : sum_with_aten(
            order.runtime(),
            home.device,
            values,
            ranges,
            piece,
            ids,
            accumulation);
  for (int64_t& id : ids) {
    id -= piece.first_row;
  }
  result.ids = to_device(ids, home.device);
  return result;
}

} // namespace torchkv

#include "summed_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "../core/errors.h"
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

// Where these are among the ids, both ascending.
std::vector<int64_t> positions_of(
    c10::ArrayRef<int64_t> these,
    c10::ArrayRef<int64_t> ids) {
  std::vector<int64_t> positions;
  positions.reserve(these.size());
  int64_t at = 0;
  for (const int64_t id : these) {
    while (ids[static_cast<size_t>(at)] != id) {
      ++at;
    }
    positions.push_back(at);
  }
  return positions;
}

bool can_read(
    Runtime& runtime,
    const Place& home,
    const Value& value,
    c10::ScalarType dtype) {
  const c10::Device device = value.device();
  return value.dtype() == dtype && device.is_cuda() &&
      (device == home.device || may_use_peer(runtime, home.device, device));
}

// The addresses of a value's rows of a piece, in the order of their ids; a copy
// of rows that cannot be read where they are is added to `copies`.
std::vector<int64_t> addresses_of(
    Runtime& runtime,
    const Place& home,
    const Value& value,
    const RowRange& range,
    const RowPiece& piece,
    c10::ScalarType dtype,
    std::vector<at::Tensor>& copies) {
  const RowSparse& rows = *rows_in(value);
  const at::Tensor* payload = value.data;
  const int64_t* order = nullptr;
  int64_t row_size = row_size_of(rows);
  int64_t first = range.begin;
  int64_t first_column = piece.first_column;
  if (!can_read(runtime, home, value, dtype)) {
    copies.push_back(
        payload_of(runtime, value, range, piece, home.device, dtype)
            .contiguous());
    payload = &copies.back();
    row_size = piece.num_columns;
    first = first_column = 0;
  } else if (rows.order.defined()) {
    order = rows.order.const_data_ptr<int64_t>();
  }
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const auto begin = reinterpret_cast<int64_t>(payload->const_data_ptr()) +
      first_column * size;
  std::vector<int64_t> addresses;
  addresses.reserve(range.of.size());
  for (size_t i = 0; i < range.of.size(); ++i) {
    const int64_t at = first + static_cast<int64_t>(i);
    const int64_t row = order == nullptr ? at : order[at];
    addresses.push_back(begin + row * row_size * size);
  }
  return addresses;
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

SummedRows sum_with_kernel(
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
  SummedRows result;
  result.sums = runtime.allocate(
      {count, piece.num_columns},
      {piece.num_columns, 1},
      accumulation,
      home.device);
  // The ids among the rows of the piece, the offsets of the sums' rows and
  // these rows' addresses: copied to the device at once, for which the host
  // waits.
  std::vector<int64_t> numbers;
  for (const int64_t id : ids) {
    numbers.push_back(id - piece.first_row);
  }
  numbers.resize(2 * ids.size() + 1);
  std::vector<std::vector<int64_t>> positions;
  auto* offsets = numbers.data() + count;
  for (const auto& range : ranges) {
    for (const int64_t at :
         positions.emplace_back(positions_of(range.of, ids))) {
      ++offsets[at + 1];
    }
  }
  std::partial_sum(offsets, offsets + count + 1, offsets);
  std::vector<int64_t> next(offsets, offsets + count);
  const int64_t num_sources = offsets[count];
  numbers.resize(numbers.size() + static_cast<size_t>(num_sources));
  auto* const addresses = numbers.data() + 2 * count + 1;
  std::vector<at::Tensor> copies;
  // Of all addresses and of the size of a row.
  uint64_t bits =
      static_cast<uint64_t>(piece.num_columns) * c10::elementSize(dtype);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto of_value =
        addresses_of(runtime, home, values[i], ranges[i], piece, dtype, copies);
    for (size_t row = 0; row < of_value.size(); ++row) {
      const auto at = static_cast<size_t>(positions[i][row]);
      addresses[next[at]++] = of_value[row];
      bits |= static_cast<uint64_t>(of_value[row]);
    }
  }
  const at::Tensor on_device = to_device(numbers, home.device);
  result.ids = on_device.narrow(0, 0, count);
  if (result.sums.numel() == 0) {
    return result;
  }
  const auto known = cuda_dtype(dtype);
  TORCHKV_INTERNAL_ASSERT(known.has_value());
  const auto* const copied = on_device.const_data_ptr<int64_t>();
  kernels::cuda::RowSums call{};
  call.value = *known;
  call.is_aligned = bits % 16 == 0;
  call.num_rows = count;
  call.num_columns = piece.num_columns * (c10::isComplexType(dtype) ? 2 : 1);
  call.offsets = copied + count;
  call.sources = reinterpret_cast<const void* const*>(copied + 2 * count + 1);
  call.sums = result.sums.mutable_data_ptr();
  kernels::cuda::check(
      kernels::cuda::table()->launch_row_sums(
          call, order.stream(home).native_handle()));
  return result;
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
    add_rows(sums, positions_of(range.of, ids), rows);
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
    std::vector<int64_t> merged(ids.size() + range.of.size());
    std::merge(
        ids.begin(),
        ids.end(),
        range.of.begin(),
        range.of.end(),
        merged.begin());
    ids.swap(merged);
  }
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  if (const auto dtype = dtype_to_read(home, values, accumulation)) {
    return sum_with_kernel(
        order, home, values, ranges, piece, ids, *dtype, accumulation);
  }
  SummedRows result;
  result.sums = sum_with_aten(
      order.runtime(), home.device, values, ranges, piece, ids, accumulation);
  for (int64_t& id : ids) {
    id -= piece.first_row;
  }
  result.ids = to_device(ids, home.device);
  return result;
}

} // namespace torchkv

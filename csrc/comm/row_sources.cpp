#include "row_sources.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "../core/errors.h"
#include "../kernels/cuda/library.h"
#include "../memory/row_ids.h"
#include "cuda_dtype.h"

namespace torchkv {
namespace {

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

// Without `sums`. `bits`: of the addresses and of the size of a row.
kernels::cuda::RowSums row_sums_of(
    c10::ScalarType dtype,
    const RowPiece& piece,
    uint64_t bits,
    int64_t num_rows,
    const int64_t* offsets,
    const int64_t* addresses) {
  const auto known = cuda_dtype(dtype);
  TORCHKV_INTERNAL_ASSERT(known.has_value());
  kernels::cuda::RowSums call{};
  call.value = *known;
  call.is_aligned = bits % 16 == 0;
  call.num_rows = num_rows;
  call.num_columns = piece.num_columns * (c10::isComplexType(dtype) ? 2 : 1);
  call.sources = reinterpret_cast<const void* const*>(addresses);
  call.offsets = offsets;
  return call;
}

bool is_empty(const RowSparse& rows) {
  return rows.ids.defined() && rows.ids.numel() == 0;
}

// The merged ids of values that are those merged, in their order, and have the
// dtype and the rows of a piece on `home`; null for others.
const MergedIds* merged_in(
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::ScalarType dtype) {
  const MergedIds* merged = nullptr;
  int64_t num_rows = 0;
  for (const auto& value : values) {
    const RowSparse& rows = *rows_in(value);
    if (is_empty(rows)) {
      continue;
    }
    const bool is_next = rows.merged != nullptr &&
        rows.first_merged == num_rows &&
        (merged == nullptr || merged == rows.merged.get());
    if (!is_next || value.device() != home.device || value.dtype() != dtype ||
        piece.num_rows != rows.sizes[0] ||
        piece.num_columns != row_size_of(rows)) {
      return nullptr;
    }
    merged = rows.merged.get();
    num_rows += rows.ids_on_device.numel();
  }
  return merged != nullptr && merged->order.numel() == num_rows ? merged
                                                                : nullptr;
}

// Nothing if merged_in() has none.
std::optional<RowSources> merged_sources_of(
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::ScalarType dtype) {
  const MergedIds* const merged = merged_in(home, values, piece, dtype);
  if (merged == nullptr) {
    return std::nullopt;
  }
  const int64_t row_bytes =
      piece.num_columns * static_cast<int64_t>(c10::elementSize(dtype));
  auto bits = static_cast<uint64_t>(row_bytes);
  std::vector<at::Tensor> addresses;
  for (const auto& value : values) {
    const RowSparse& rows = *rows_in(value);
    if (is_empty(rows)) {
      continue;
    }
    const auto begin = reinterpret_cast<int64_t>(value.data->const_data_ptr());
    bits |= static_cast<uint64_t>(begin);
    addresses.push_back(
        at::arange(
            begin,
            begin + rows.ids_on_device.numel() * row_bytes,
            row_bytes,
            merged->ids.options()));
  }
  const at::Tensor given =
      addresses.size() == 1 ? addresses[0] : at::cat(addresses);
  const at::Tensor sources = given.index_select(0, merged->order);
  RowSources result;
  result.ids = merged->ids;
  result.numbers = merged->offsets;
  result.copies = {sources};
  result.call = row_sums_of(
      dtype,
      piece,
      bits,
      merged->ids.numel(),
      merged->offsets.const_data_ptr<int64_t>(),
      sources.const_data_ptr<int64_t>());
  return result;
}

} // namespace

int64_t row_size_of(const RowSparse& rows) {
  return c10::multiply_integers(rows.sizes.begin() + 1, rows.sizes.end());
}

RowRange::RowRange(const RowSparse& rows, const RowPiece& piece) {
  bring_ids(rows);
  const auto* const ids = rows.ids.const_data_ptr<int64_t>();
  const auto* const last = ids + rows.ids.numel();
  const auto* const from = std::lower_bound(ids, last, piece.first_row);
  const auto* const to =
      std::lower_bound(from, last, piece.first_row + piece.num_rows);
  begin = from - ids;
  of = c10::ArrayRef<int64_t>(from, to);
  is_distinct = std::adjacent_find(from, to) == to;
}

MergedRows::MergedRows(c10::ArrayRef<Value> values, const RowPiece& of)
    : piece(of) {
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

at::Tensor to_device(
    Runtime& runtime,
    c10::ArrayRef<int64_t> numbers,
    c10::Device device) {
  const auto count = static_cast<int64_t>(numbers.size());
  const at::Tensor on_host =
      at::empty({count}, at::TensorOptions(c10::kCPU).dtype(c10::kLong));
  std::copy(
      numbers.begin(), numbers.end(), on_host.mutable_data_ptr<int64_t>());
  at::Tensor result = runtime.allocate({count}, {1}, c10::kLong, device);
  runtime.copy(result, on_host);
  return result;
}

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

RowSources row_sources_of(
    Runtime& runtime,
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::ScalarType dtype) {
  if (auto merged = merged_sources_of(home, values, piece, dtype)) {
    return *merged;
  }
  const MergedRows rows(values, piece);
  const auto count = static_cast<int64_t>(rows.ids.size());
  RowSources result;
  if (count == 0) {
    return result;
  }
  // The ids among the rows of the piece, the offsets of the sums' rows and
  // these rows' addresses: copied to the device at once.
  std::vector<int64_t> numbers;
  numbers.reserve(2 * rows.ids.size() + 1);
  for (const int64_t id : rows.ids) {
    numbers.push_back(id - piece.first_row);
  }
  numbers.resize(2 * rows.ids.size() + 1);
  std::vector<std::vector<int64_t>> positions;
  auto* offsets = numbers.data() + count;
  for (const auto& range : rows.ranges) {
    for (const int64_t at :
         positions.emplace_back(positions_of(range.of, rows.ids))) {
      ++offsets[at + 1];
    }
  }
  std::partial_sum(offsets, offsets + count + 1, offsets);
  std::vector<int64_t> next(offsets, offsets + count);
  const int64_t num_sources = offsets[count];
  numbers.resize(numbers.size() + static_cast<size_t>(num_sources));
  auto* const addresses = numbers.data() + 2 * count + 1;
  // Of all addresses and of the size of a row.
  uint64_t bits =
      static_cast<uint64_t>(piece.num_columns) * c10::elementSize(dtype);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto of_value = addresses_of(
        runtime, home, values[i], rows.ranges[i], piece, dtype, result.copies);
    for (size_t row = 0; row < of_value.size(); ++row) {
      const auto at = static_cast<size_t>(positions[i][row]);
      addresses[next[at]++] = of_value[row];
      bits |= static_cast<uint64_t>(of_value[row]);
    }
  }
  result.numbers = to_device(runtime, numbers, home.device);
  result.ids = result.numbers.narrow(0, 0, count);
  const auto* const copied = result.numbers.const_data_ptr<int64_t>();
  result.call = row_sums_of(
      dtype, piece, bits, count, copied + count, copied + 2 * count + 1);
  return result;
}

} // namespace torchkv

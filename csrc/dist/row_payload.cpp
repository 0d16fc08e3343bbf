#include "row_payload.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "../core/plain_dispatch.h"
#include "../kernels/cpu/row_memory.h"

namespace torchkv::dist {
namespace {

struct RowsHeader {
  RowForm form = RowForm::kRows;
  int64_t num_ids = 0;
};
static_assert(sizeof(RowsHeader) == kIdsBegin);

RowsHeader header_of(const Blob& payload) {
  RowsHeader header;
  std::memcpy(&header, payload.data(), sizeof(header));
  return header;
}

// The cells of a slice that a value has: their ids, and their numbers among the
// cells of the value's rows in memory.
struct Cells {
  std::vector<int64_t> ids;
  std::vector<int64_t> numbers;
};

Cells cells_of(const RowSparse& value, int64_t per_row, const Place& slice) {
  // In cells of the key.
  const int64_t first = slice.begin;
  const int64_t end = slice.end;
  const auto* const ids = value.ids.const_data_ptr<int64_t>();
  const auto* const last = ids + value.ids.numel();
  const auto* const order =
      value.order.defined() ? value.order.const_data_ptr<int64_t>() : nullptr;
  const auto number_of = [&](const int64_t* id) {
    return order == nullptr ? id - ids : order[id - ids];
  };
  Cells cells;
  // Rows that are partly in the slice, too.
  const auto* id = std::lower_bound(ids, last, first / per_row);
  while (id != last && *id * per_row < end) {
    const auto* const next = std::upper_bound(id, last, *id);
    const int64_t row = *id * per_row;
    // Repeats of a row by cell, so that ids ascend.
    for (int64_t cell = std::max(row, first);
         cell < std::min(row + per_row, end);
         ++cell) {
      for (const auto* repeat = id; repeat != next; ++repeat) {
        cells.ids.push_back(cell - first);
        cells.numbers.push_back(number_of(repeat) * per_row + cell - row);
      }
    }
    id = next;
  }
  return cells;
}

// The same of each slice of a row-sparse key.
std::vector<Cells> rows_of_slices(const RowSparse& value, size_t num_slices) {
  std::vector<Cells> result(num_slices);
  const auto* const ids = value.ids.const_data_ptr<int64_t>();
  const auto* const order =
      value.order.defined() ? value.order.const_data_ptr<int64_t>() : nullptr;
  for (int64_t i = 0; i < value.ids.numel(); ++i) {
    Cells& cells = result[slice_of_row(ids[i], num_slices)];
    cells.ids.push_back(ids[i]);
    cells.numbers.push_back(order == nullptr ? i : order[i]);
  }
  return result;
}

std::vector<Cells> cells_of_slices(
    const RowSparse& value,
    const KeySpec& spec,
    c10::ArrayRef<Place> places) {
  if (spec.is_row_sparse()) {
    return rows_of_slices(value, places.size());
  }
  const int64_t cell = cell_size(spec, places);
  const int64_t per_row = cell == 0 ? 1 : row_size(spec) / cell;
  std::vector<Cells> result;
  for (Place slice : places) {
    slice.begin = cell == 0 ? 0 : slice.begin / cell;
    slice.end = cell == 0 ? 0 : slice.end / cell; // without elements: no rows
    result.push_back(cells_of(value, per_row, slice));
  }
  return result;
}

// With room for the cells.
at::Tensor with_header(
    RowForm form,
    const std::vector<int64_t>& ids,
    int64_t cell_bytes,
    const Buffers& buffers) {
  const RowsHeader header{form, static_cast<int64_t>(ids.size())};
  const auto begin = static_cast<size_t>(cells_begin(header.num_ids));
  const size_t num_bytes = ids.size() * sizeof(int64_t);
  const at::Tensor payload = buffers.empty_codes(
      cells_begin(header.num_ids) + header.num_ids * cell_bytes);
  auto* const data = static_cast<char*>(payload.mutable_data_ptr());
  std::memcpy(data, &header, sizeof(header));
  if (!ids.empty()) { // memcpy takes no null pointer
    std::memcpy(data + sizeof(header), ids.data(), num_bytes);
  }
  std::memset(
      data + sizeof(header) + num_bytes, 0, begin - sizeof(header) - num_bytes);
  return payload;
}

} // namespace

std::vector<Blob> pack_rows(
    const RowSparse& value,
    const at::Tensor& rows,
    const KeySpec& spec,
    c10::ArrayRef<Place> places,
    const Buffers& buffers) {
  const kernels::cpu::RowMemory memory{
      static_cast<char*>(const_cast<void*>(rows.const_data_ptr())),
      cell_size(spec, places),
      rows.scalar_type()};
  std::vector<Blob> payloads;
  for (const auto& cells : cells_of_slices(value, spec, places)) {
    const at::Tensor payload =
        with_header(RowForm::kRows, cells.ids, memory.row_bytes(), buffers);
    const auto count = static_cast<int64_t>(cells.ids.size());
    kernels::cpu::gather_rows(
        memory,
        cells.numbers.data(),
        cells.ids.data(),
        count,
        RowInit(),
        static_cast<char*>(payload.mutable_data_ptr()) + cells_begin(count));
    payloads.push_back(blob_of(payload));
  }
  return payloads;
}

std::vector<Blob> pack_ids(
    RowForm form,
    const at::Tensor& ids,
    const KeySpec& spec,
    c10::ArrayRef<Place> places,
    const Buffers& buffers) {
  RowSparse value;
  value.ids = ids;
  std::vector<Blob> payloads;
  for (const auto& cells : cells_of_slices(value, spec, places)) {
    payloads.push_back(blob_of(with_header(form, cells.ids, 0, buffers)));
  }
  return payloads;
}

Blob pack_count_query(const Buffers& buffers) {
  return blob_of(with_header(RowForm::kCount, {}, 0, buffers));
}

Blob pack_ids_query(int64_t begin, int64_t count, const Buffers& buffers) {
  // As if `begin` was an id.
  const at::Tensor payload = with_header(RowForm::kIds, {begin}, 0, buffers);
  const RowsHeader header{RowForm::kIds, count};
  std::memcpy(payload.mutable_data_ptr(), &header, sizeof(header));
  return blob_of(payload);
}

bool has_form(const Blob& payload, RowForm form) {
  return payload.size() >= sizeof(RowsHeader) &&
      header_of(payload).form == form;
}

int64_t number_in(const Blob& payload) {
  return header_of(payload).num_ids;
}

int64_t row_bytes(const KeySpec& spec) {
  const auto dtype = static_cast<c10::ScalarType>(spec.dtype);
  TORCH_CHECK_VALUE(
      dtype < c10::ScalarType::NumOptions &&
          c10::elementSize(dtype) == static_cast<size_t>(spec.item_bytes),
      "expected elements of ",
      spec.item_bytes,
      " bytes, but got dtype ",
      spec.dtype);
  return row_size(spec) * spec.item_bytes;
}

int64_t begin_in(const Blob& payload) {
  int64_t begin = -1;
  if (has_form(payload, RowForm::kIds) &&
      payload.size() >= kIdsBegin + sizeof(begin)) {
    std::memcpy(&begin, payload.data() + kIdsBegin, sizeof(begin));
  }
  return begin;
}

at::Tensor ids_in(
    const Blob& payload,
    int64_t num_cells,
    int64_t cell_bytes,
    IdOrder order) {
  const int64_t count = header_of(payload).num_ids;
  const auto size = static_cast<int64_t>(payload.size());
  bool is_good = count >= 0 && count <= size / 8 &&
      (cell_bytes == 0 || count <= size / cell_bytes) &&
      cells_begin(count) + count * cell_bytes == size;
  const PlainDispatch plain;
  at::Tensor ids =
      at::empty({is_good ? count : 0}, at::TensorOptions(c10::kLong));
  auto* const id = ids.mutable_data_ptr<int64_t>();
  if (ids.numel() != 0) {
    std::memcpy(
        id,
        payload.data() + sizeof(RowsHeader),
        static_cast<size_t>(count) * sizeof(int64_t));
  }
  int64_t least = 0;
  for (int64_t i = 0; is_good && i < count; ++i) {
    is_good = id[i] >= least && id[i] < num_cells;
    least = order == IdOrder::kAscending ? id[i] : 0;
  }
  if (is_good && order == IdOrder::kDistinct) {
    const at::Tensor sorted = std::get<0>(ids.sort());
    const auto* const begin = sorted.const_data_ptr<int64_t>();
    const auto* const end = begin + count;
    is_good = std::adjacent_find(begin, end) == end;
  }
  TORCH_CHECK_VALUE(
      is_good,
      "expected rows of a slice of ",
      num_cells,
      " rows of ",
      cell_bytes,
      " bytes, but got ",
      count,
      " in ",
      size,
      " bytes that are not");
  return ids;
}

at::Tensor cells_in(
    const Blob& payload,
    int64_t count,
    int64_t cell_size,
    c10::ScalarType dtype,
    const Buffers& buffers) {
  const auto begin = static_cast<size_t>(cells_begin(count));
  return tensor_of(
      payload.slice(begin, payload.size() - begin),
      {count, cell_size},
      dtype,
      buffers);
}

} // namespace torchkv::dist

#include "row_merge.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/unique_consecutive.h>

#include <limits>
#include <vector>

namespace torchkv {
namespace {

bool is_empty(const RowSparse& rows) {
  return rows.ids.defined() && rows.ids.numel() == 0;
}

bool can_merge(
    const Place& home,
    const Value& value,
    const RowPiece& piece,
    c10::ScalarType dtype) {
  const RowSparse& rows = *rows_in(value);
  return is_empty(rows) ||
      (rows.ids_on_device.defined() && value.device() == home.device &&
       value.dtype() == dtype && piece.num_rows == rows.sizes[0] &&
       piece.num_columns == row_size_of(rows));
}

} // namespace

std::optional<RowSources> merge_on_device(
    Runtime& runtime,
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::ScalarType dtype) {
  constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
  int64_t num_ids = 0;
  for (const auto& value : values) {
    if (!can_merge(home, value, piece, dtype)) {
      return std::nullopt;
    }
    const RowSparse& rows = *rows_in(value);
    num_ids += is_empty(rows) ? 0 : rows.ids_on_device.numel();
  }
  if (num_ids == 0 || num_ids > kMaxInt) { // PyTorch sorts no more on CUDA
    return std::nullopt;
  }
  const int64_t row_bytes =
      piece.num_columns * static_cast<int64_t>(c10::elementSize(dtype));
  auto bits = static_cast<uint64_t>(row_bytes);
  std::vector<at::Tensor> given;
  std::vector<at::Tensor> addresses;
  for (const auto& value : values) {
    if (is_empty(*rows_in(value))) {
      continue;
    }
    const at::Tensor& ids = given.emplace_back(rows_in(value)->ids_on_device);
    const auto begin = reinterpret_cast<int64_t>(value.data->const_data_ptr());
    bits |= static_cast<uint64_t>(begin);
    addresses.push_back(
        at::arange(
            begin, begin + ids.numel() * row_bytes, row_bytes, ids.options()));
  }
  // Rows of one id stay in the order of the values. Half the bits are sorted in
  // half the time.
  const auto [sorted, order] = at::sort(
      at::cat(given).to(piece.num_rows <= kMaxInt ? c10::kInt : c10::kLong),
      /*stable=*/true,
      /*dim=*/0,
      /*descending=*/false);
  // Waits until the ids have been read: nothing keeps them after the call.
  const auto [ids, positions, counts] = at::unique_consecutive(
      sorted, /*return_inverse=*/false, /*return_counts=*/true);
  const int64_t count = ids.numel();
  const at::Tensor offsets =
      runtime.allocate({count + 1}, {1}, c10::kLong, home.device);
  offsets.narrow(0, 0, 1).zero_();
  at::Tensor ends = offsets.narrow(0, 1, count);
  at::cumsum_out(ends, counts, 0);
  const at::Tensor sources = at::cat(addresses).index_select(0, order);
  RowSources result;
  result.ids = ids.to(c10::kLong);
  result.numbers = offsets;
  result.copies = {sources};
  result.call = row_sums_of(
      dtype,
      piece,
      bits,
      count,
      offsets.const_data_ptr<int64_t>(),
      sources.const_data_ptr<int64_t>());
  return result;
}

} // namespace torchkv

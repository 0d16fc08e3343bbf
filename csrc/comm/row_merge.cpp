#include "row_merge.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/unique_consecutive.h>

#include <limits>
#include <vector>

#include "../core/errors.h"
#include "cuda_dtype.h"

namespace torchkv {
namespace {

bool can_merge(
    const Place& home,
    const Value& value,
    const RowPiece& piece,
    c10::ScalarType dtype) {
  const RowSparse& rows = *rows_in(value);
  return rows.ids_on_device.defined() && value.device() == home.device &&
      value.dtype() == dtype && piece.num_rows == rows.sizes[0] &&
      piece.num_columns == row_size_of(rows);
}

} // namespace

std::optional<RowSources> merge_on_device(
    Runtime& runtime,
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::ScalarType dtype) {
  const auto known = cuda_dtype(dtype);
  TORCHKV_INTERNAL_ASSERT(known.has_value());
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t row_bytes = piece.num_columns * size;
  // Of all addresses and of the size of a row.
  auto bits = static_cast<uint64_t>(row_bytes);
  std::vector<at::Tensor> given;
  std::vector<at::Tensor> addresses;
  for (const auto& value : values) {
    if (!can_merge(home, value, piece, dtype)) {
      return std::nullopt;
    }
  }
  for (const auto& value : values) {
    const at::Tensor& ids = rows_in(value)->ids_on_device;
    const auto begin = reinterpret_cast<int64_t>(value.data->const_data_ptr());
    bits |= static_cast<uint64_t>(begin);
    given.push_back(ids);
    addresses.push_back(
        at::arange(
            begin, begin + ids.numel() * row_bytes, row_bytes, ids.options()));
  }
  // Rows of one id stay in the order of the values. Half the bits are sorted in
  // half the time.
  const bool fits = piece.num_rows <= std::numeric_limits<int32_t>::max();
  const auto [sorted, order] = at::sort(
      at::cat(given).to(fits ? c10::kInt : c10::kLong),
      /*stable=*/true,
      /*dim=*/0,
      /*descending=*/false);
  const auto [ids, positions, counts] = at::unique_consecutive(
      sorted, /*return_inverse=*/false, /*return_counts=*/true);
  RowSources result;
  const int64_t count = ids.numel();
  const at::Tensor sources = at::cat(addresses).index_select(0, order);
  const at::Tensor offsets =
      runtime.allocate({count + 1}, {1}, c10::kLong, home.device);
  offsets.narrow(0, 0, 1).zero_();
  at::Tensor ends = offsets.narrow(0, 1, count);
  at::cumsum_out(ends, counts, 0);
  result.ids = ids.to(c10::kLong);
  result.numbers = offsets;
  result.copies = {sources};
  result.call.value = *known;
  result.call.is_aligned = bits % 16 == 0;
  result.call.num_rows = count;
  result.call.num_columns =
      piece.num_columns * (c10::isComplexType(dtype) ? 2 : 1);
  result.call.offsets = offsets.const_data_ptr<int64_t>();
  result.call.sources =
      reinterpret_cast<const void* const*>(sources.const_data_ptr<int64_t>());
  return result;
}

} // namespace torchkv

#include "row_ids.h"

#include <ATen/ops/empty.h>

#include "../core/plain_dispatch.h"

namespace torchkv {
namespace {

kernels::cpu::RowIdsFound inspect(int64_t limit, const RowSparse& rows) {
  return kernels::cpu::inspect_row_ids(
      rows.ids.const_data_ptr<int64_t>(), rows.ids.numel(), limit);
}

} // namespace

void sort_rows(
    int64_t limit,
    const kernels::cpu::RowIdsFound& found,
    const RowSparse& rows) {
  rows.is_distinct = found.is_ascending && found.is_distinct;
  if (found.is_ascending) {
    return;
  }
  const PlainDispatch plain;
  const int64_t count = rows.ids.numel();
  const at::Tensor sorted = at::empty({count}, rows.ids.options());
  const at::Tensor order = at::empty({count}, rows.ids.options());
  kernels::cpu::sort_row_ids(
      rows.ids.const_data_ptr<int64_t>(),
      count,
      limit,
      sorted.mutable_data_ptr<int64_t>(),
      order.mutable_data_ptr<int64_t>());
  rows.ids = sorted;
  rows.order = order;
}

void sort_rows(int64_t limit, RowSparse& rows) {
  sort_rows(limit, inspect(limit, rows), rows);
}

void bring_ids(const RowSparse& rows) {
  if (rows.ids.defined()) {
    return;
  }
  const PlainDispatch plain;
  rows.ids = rows.ids_on_device.to(c10::kCPU);
  const int64_t limit = rows.sizes[0];
  sort_rows(limit, inspect(limit, rows), rows);
}

} // namespace torchkv

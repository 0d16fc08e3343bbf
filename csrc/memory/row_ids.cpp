#include "row_ids.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <utility>

#include "../core/plain_dispatch.h"

namespace torchkv {
namespace {

kernels::cpu::RowIdsFound inspect(const at::Tensor& ids, int64_t limit) {
  return kernels::cpu::inspect_row_ids(
      ids.const_data_ptr<int64_t>(), ids.numel(), limit);
}

} // namespace

void set_ids(
    const RowSparse& rows,
    const at::Tensor& ids,
    int64_t limit,
    const kernels::cpu::RowIdsFound& found) {
  at::Tensor sorted = ids;
  at::Tensor order;
  if (!found.is_ascending) {
    const PlainDispatch plain;
    sorted = at::empty(ids.sizes(), ids.options());
    order = at::empty(ids.sizes(), ids.options());
    kernels::cpu::sort_row_ids(
        ids.const_data_ptr<int64_t>(),
        ids.numel(),
        limit,
        sorted.mutable_data_ptr<int64_t>(),
        order.mutable_data_ptr<int64_t>());
  }
  rows.ids = std::move(sorted);
  rows.order = std::move(order);
  rows.is_distinct = found.is_ascending && found.is_distinct;
}

void set_ids(const RowSparse& rows, const at::Tensor& ids, int64_t limit) {
  set_ids(rows, ids, limit, inspect(ids, limit));
}

void bring_ids(const RowSparse& rows) {
  if (rows.ids.defined()) {
    return;
  }
  const PlainDispatch plain;
  const at::Tensor ids = rows.ids_on_device.to(c10::kCPU);
  const int64_t limit = rows.sizes[0];
  const auto found = inspect(ids, limit);
  // They were checked on the device.
  TORCH_CHECK_INDEX(
      found.first_bad < 0,
      "torchkv: expected that nothing changes the ids of a sparse value while "
      "it is pushed, but one is ",
      ids.const_data_ptr<int64_t>()[found.first_bad],
      " now");
  set_ids(rows, ids, limit, found);
}

} // namespace torchkv

#include "parse_row_ids.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <utility>

#include "../core/plain_dispatch.h"
#include "check.h"

namespace torchkv {
namespace {

// TypeError, or what check_storable throws, unless they may be row ids.
void check_row_ids(const Where& where, const at::Tensor& given) {
  TORCHKV_CHECK_TYPE(
      !given.defined() || given.layout() == c10::kStrided,
      where,
      "expected dense row ids, but got a tensor of layout ",
      given.layout());
  TORCHKV_CHECK_TYPE(
      given.defined() &&
          (given.scalar_type() == c10::kLong ||
           given.scalar_type() == c10::kInt),
      where,
      "expected row ids of dtype torch.int32 or torch.int64, but got ",
      given.defined() ? dtype_name(given.scalar_type())
                      : "an undefined tensor");
  check_storable(where, given);
}

} // namespace

at::Tensor parse_row_ids(
    const Where& where,
    const Meta& meta,
    const at::Tensor& given) {
  check_row_ids(where, given);
  const PlainDispatch plain;
  const at::Tensor ids =
      given.to(at::TensorOptions(c10::kCPU).dtype(c10::kLong))
          .contiguous()
          .view(-1);
  const auto* const begin = ids.const_data_ptr<int64_t>();
  const auto* const end = begin + ids.numel();
  const int64_t num_rows = meta.sizes[0];
  const auto* const bad = std::find_if(
      begin, end, [&](int64_t id) { return id < 0 || id >= num_rows; });
  TORCH_CHECK_INDEX(
      bad == end,
      where.op,
      ": expected row ids from 0 to ",
      num_rows - 1,
      ", for a value of ",
      num_rows,
      " rows, but got ",
      *bad,
      ' ',
      where.key.context());
  return ids;
}

at::Tensor distinct_ids(const at::Tensor& ids) {
  const auto* const begin = ids.const_data_ptr<int64_t>();
  std::vector<int64_t> sorted(begin, begin + ids.numel());
  if (!std::is_sorted(sorted.begin(), sorted.end())) {
    std::sort(sorted.begin(), sorted.end());
  }
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  const at::Tensor result =
      at::empty({static_cast<int64_t>(sorted.size())}, ids.options());
  std::copy(sorted.begin(), sorted.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

at::Tensor UncheckedRowIds::add(
    const Where& where,
    const Meta& meta,
    const at::Tensor& given) {
  check_row_ids(where, given);
  const PlainDispatch plain;
  at::Tensor ids = given.to(c10::kLong).contiguous().view(-1);
  if (ids.numel() != 0) {
    added_.push_back({where.key, meta, given, ids});
  }
  return ids;
}

void UncheckedRowIds::check(const char* op) {
  const PlainDispatch plain;
  while (!added_.empty()) {
    const c10::Device device = added_[0].given.device();
    std::vector<Added> of_device;
    std::vector<Added> others;
    for (auto& each : added_) {
      const bool is_of_device = each.given.device() == device;
      (is_of_device ? of_device : others).push_back(std::move(each));
    }
    added_ = std::move(others);
    std::vector<at::Tensor> bounds; // the least and the greatest of each
    for (const auto& each : of_device) {
      const auto [least, most] = at::aminmax(each.ids);
      bounds.insert(bounds.end(), {least, most});
    }
    const at::Tensor on_host = at::stack(bounds).to(c10::kCPU);
    const auto* bound = on_host.const_data_ptr<int64_t>();
    for (const auto& each : of_device) {
      if (bound[0] < 0 || bound[1] >= each.meta.sizes[0]) {
        parse_row_ids({op, each.key}, each.meta, each.given); // throws
      }
      bound += 2;
    }
  }
}

} // namespace torchkv

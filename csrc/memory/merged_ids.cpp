#include "merged_ids.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>

#include <algorithm>

namespace torchkv {
namespace {

// Where the ids and the rows of each key begin among those of all, and how many
// there are in all.
struct Begins {
  explicit Begins(c10::ArrayRef<IdsOfKey> keys) {
    for (const auto& key : keys) {
      int64_t num_ids = 0;
      for (const auto& value : key.values) {
        num_ids += value.numel();
      }
      ids.push_back(ids.back() + num_ids);
      rows.push_back(rows.back() + key.num_rows);
    }
  }

  std::vector<int64_t> ids{0};
  std::vector<int64_t> rows{0};
};

// The ids of several keys as numbers of rows, counted over all keys.
struct Numbered {
  at::Tensor rows;
  at::Tensor begins; // of the keys' rows
  at::Tensor is_bad; // whether an id is not a row of its key
  at::Tensor table; // which the device may read until the host has waited
};

Numbered number_rows(const at::Tensor& ids, const Begins& begins) {
  const auto num_keys = static_cast<int64_t>(begins.ids.size()) - 1;
  const at::Tensor table =
      at::empty({2 * num_keys + 1}, at::TensorOptions().dtype(c10::kLong));
  auto* const first = table.mutable_data_ptr<int64_t>();
  std::copy(
      begins.rows.begin(),
      begins.rows.end(),
      std::copy_n(begins.ids.begin(), num_keys, first));
  const at::Tensor on_device = table.to(ids.device(), /*non_blocking=*/true);
  const auto key_of = [](const at::Tensor& numbers, const at::Tensor& of_keys) {
    return at::bucketize(numbers, of_keys, /*out_int32=*/false, /*right=*/true);
  };
  // From 1; so the first row of a key is one behind it in the table.
  const at::Tensor key = key_of(
      at::arange(ids.numel(), ids.options()), on_device.narrow(0, 0, num_keys));
  Numbered result;
  result.table = table;
  result.begins = on_device.narrow(0, num_keys, num_keys + 1);
  result.rows = ids.add(
      on_device.narrow(0, num_keys - 1, num_keys + 1).index_select(0, key));
  result.is_bad = key_of(result.rows, result.begins).ne(key).any();
  return result;
}

std::vector<int64_t> to_host(const at::Tensor& numbers) {
  const at::Tensor copy = numbers.to(c10::kCPU);
  const auto* const first = copy.const_data_ptr<int64_t>();
  return {first, first + copy.numel()};
}

} // namespace

std::vector<MergedIds> merge_ids(c10::ArrayRef<IdsOfKey> keys) {
  const Begins begins(keys);
  std::vector<at::Tensor> given;
  for (const auto& key : keys) {
    given.insert(given.end(), key.values.begin(), key.values.end());
  }
  const at::Tensor all = given.size() == 1 ? given[0] : at::cat(given);
  const bool is_single = keys.size() == 1;
  const Numbered numbered =
      is_single ? Numbered{all, {}, {}, {}} : number_rows(all, begins);
  // Ids of one row stay in the order of the values. Half the bits are sorted in
  // half the time.
  const bool fits = begins.rows.back() <= std::numeric_limits<int32_t>::max();
  const auto dtype = fits ? c10::kInt : c10::kLong;
  const auto [sorted, order] = at::sort(
      numbered.rows.to(dtype),
      /*stable=*/true,
      /*dim=*/0,
      /*descending=*/false);
  const int64_t num_sorted = sorted.numel();
  // How many distinct rows come before each, and in the end how many there are.
  const at::Tensor num_before = at::constant_pad_nd(
      at::cumsum(
          sorted.narrow(0, 1, num_sorted - 1)
              .ne(sorted.narrow(0, 0, num_sorted - 1)),
          0),
      {1, 0});
  const at::Tensor last = num_before.narrow(0, num_sorted - 1, 1).add(1);
  // Where the sorted rows begin of each distinct one, and end of the last one.
  const auto begins_of_rows = [&](int64_t count) {
    return at::searchsorted(num_before, at::arange(count + 1, all.options()));
  };
  if (is_single) {
    const auto [least, most] = at::aminmax(all);
    const auto found =
        to_host(at::cat({last, least.view({1}), most.view({1})}));
    if (found[1] < 0 || found[2] >= keys[0].num_rows) {
      return {};
    }
    const at::Tensor offsets = begins_of_rows(found[0]);
    const at::Tensor distinct =
        sorted.index_select(0, offsets.narrow(0, 0, found[0]));
    return {{distinct.to(c10::kLong), offsets, order}};
  }

  const at::Tensor firsts_of_keys =
      at::cat({num_before, last})
          .index_select(0, at::searchsorted(sorted, numbered.begins.to(dtype)));
  const auto found = to_host(
      at::cat({numbered.is_bad.to(c10::kLong).view({1}), firsts_of_keys}));
  if (found[0] != 0) {
    return {};
  }
  const auto* const firsts = found.data() + 1; // of the distinct rows
  const at::Tensor offsets = begins_of_rows(found.back());
  const at::Tensor ids = all.index_select(
      0, order.index_select(0, offsets.narrow(0, 0, found.back())));
  std::vector<MergedIds> result;
  for (size_t i = 0; i < keys.size(); ++i) {
    const int64_t begin = begins.ids[i];
    const int64_t num_ids = begins.ids[i + 1] - begin;
    const int64_t num_distinct = firsts[i + 1] - firsts[i];
    result.push_back(
        {ids.narrow(0, firsts[i], num_distinct),
         offsets.narrow(0, firsts[i], num_distinct + 1).sub(begin),
         order.narrow(0, begin, num_ids).sub(begin)});
  }
  return result;
}

} // namespace torchkv

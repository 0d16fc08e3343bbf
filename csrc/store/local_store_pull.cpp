// How the values of a LocalStore, or rows of them, are copied out.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <deque>
#include <mutex>
#include <utility>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../core/sparse.h"
#include "../memory/gather_rows.h"
#include "../memory/layout.h"
#include "../memory/row_slices.h"
#include "check.h"
#include "count_calls.h"
#include "local_store.h"
#include "locked_ranges.h"
#include "row_values.h"
#include "shared_values.h"

namespace torchkv {
namespace {

// The rows of a row-sparse value.
at::Tensor sparse_copy(const Entry& entry) {
  const c10::InferenceMode normal(false);
  const PlainDispatch plain;
  const auto [ids, rows] = rows_by_id(entry);
  return sparse_of_rows(ids, rows, entry.meta);
}

void pull_row_sparse(const Entry& entry, const RowPull& pull) {
  const PlainDispatch plain;
  const at::Tensor ids = pull.ids.to(c10::kCPU);
  if (pull.rows.is_cpu()) {
    copy_rows(entry, ids, pull.rows);
    return;
  }
  const at::Tensor rows =
      at::empty(pull.rows.sizes(), pull.rows.options().device(c10::kCPU));
  copy_rows(entry, ids, rows);
  pull.rows.copy_(rows);
}

} // namespace

WorkPtr LocalStore::pull(const Call& given) {
  std::optional<AsyncScope> scope;
  Entries entries = table_.find(given.op, given.keys);
  check_min_version(given, entries);
  const std::optional<DenseOuts> dense = dense_outs(given);
  SparseOuts sparse;
  if (dense) {
    sparse = sparse_outs(given, entries);
    entries = table_.find(given.op, dense->keys);
  }
  const Call call{
      given.op,
      dense ? dense->keys : given.keys,
      nullptr,
      dense ? &dense->outs : given.outs,
      given.options};
  if (!entries.empty()) {
    check(call, entries, {});
  }
  const Groups outs(std::move(entries), *call.outs);
  enter(scope, call, outs.entries());
  // All before any out is written, as rows that do not fit are refused.
  std::vector<std::pair<at::Tensor, double>> values;
  values.reserve(sparse.size());
  for (const auto& [entry, out] : sparse) {
    const Stopwatch watch;
    const at::Tensor value = sparse_for(*entry, out);
    values.emplace_back(value, watch.seconds());
  }
  for (size_t i = 0; i < sparse.size(); ++i) {
    const auto& [entry, out] = sparse[i];
    const auto& [value, seconds] = values[i];
    copy_to_sparse(*entry, value, out, seconds);
  }
  copy_out(outs);
  return scope ? scope->finish() : nullptr;
}

std::vector<at::Tensor> LocalStore::pull(
    const Keys& keys,
    const CallOptions& options) {
  constexpr auto* op = "pull";
  check_not_empty(op, keys);
  const Call call{op, keys, nullptr, nullptr, options};
  const Entries entries = find(call, {});
  check_min_version(call, entries);
  std::vector<at::Tensor> result;
  Entries dense;
  Tensors outs;
  for (const auto& entry : entries) {
    const std::lock_guard lock(entry->mutex);
    if (entry->rows != nullptr) {
      const Stopwatch watch;
      result.push_back(sparse_copy(*entry));
      count_rows(*entry, sparse_impl(result.back()).values(), watch.seconds());
      continue;
    }
    result.push_back(
        slices_.empty_like(*entry, entry->meta.dtype, entry->device));
    dense.push_back(entry);
    outs.append(result.back());
    outs.end_group();
  }
  copy_out(Groups(std::move(dense), outs));
  return result;
}

// On one machine, waiting would wait for this very thread.
void LocalStore::check_min_version(const Call& call, const Entries& entries) {
  if (call.options.min_version <= 0) {
    return;
  }
  for (const auto& entry : entries) {
    const Where where{call.op, entry->key};
    const std::lock_guard lock(entry->mutex);
    TORCHKV_CHECK_VALUE(
        entry->version >= call.options.min_version,
        where,
        "expected at least version ",
        call.options.min_version,
        ", but the value has version ",
        entry->version);
  }
}

void LocalStore::copy_out(const Groups& outs) const {
  for_each_locked(outs, [&](size_t begin, size_t end) {
    const Stopwatch watch;
    c10::SmallVector<Item, 1> items;
    std::deque<c10::SmallVector<at::Tensor, 1>> of_shared;
    items.reserve(end - begin);
    const auto copy = [&] {
      placement_.place(items, may_shard_);
      reducer_.copy_out(items);
      count_pull(items, watch.seconds());
      items.clear();
    };
    for (size_t i = begin; i < end; ++i) {
      Entry& entry = *outs.entries()[i];
      c10::ArrayRef<at::Tensor> tensors =
          outs.tensors().of(static_cast<int64_t>(i));
      if (entry.rows != nullptr) {
        copy(); // in order, as outs may overlap
        copy_to_dense(entry, tensors);
        continue;
      }
      if (entry.is_shared) {
        tensors = of_shared.emplace_back(without_itself(entry, tensors));
      }
      items.push_back({&entry, {}, tensors, nullptr});
    }
    copy();
  });
}

// Rows that the value does not have get their initial value.
void LocalStore::copy_to_dense(Entry& entry, c10::ArrayRef<at::Tensor> outs)
    const {
  const Stopwatch watch;
  const PlainDispatch plain;
  const at::Tensor ids = at::arange(
      entry.meta.sizes[0], at::TensorOptions(c10::kCPU).dtype(c10::kLong));
  for (const auto& out : outs) {
    const bool in_place = is_plain_cpu(out) && out.is_contiguous() &&
        out.scalar_type() == entry.meta.dtype;
    if (in_place) {
      copy_rows(entry, ids, out);
    } else {
      const at::Tensor whole = at::empty(
          entry.meta.sizes,
          at::TensorOptions(c10::kCPU).dtype(entry.meta.dtype));
      copy_rows(entry, ids, whole);
      slices_.copy(out, whole);
    }
    note_written(out);
  }
  count_pull(Item{&entry, {}, outs, nullptr}, watch.seconds());
}

at::Tensor LocalStore::sparse_for(Entry& entry, const at::Tensor& out) const {
  const PlainDispatch plain;
  const std::lock_guard lock(entry.mutex);
  if (entry.rows == nullptr) {
    return sparse_of_all_rows(slices_.copy_of(entry, c10::kCPU).contiguous());
  }
  const auto [ids, rows] = rows_by_id(entry);
  check_rows_fit({"pull", entry.key}, ids, out);
  return make_sparse(ids, rows, out.sizes());
}

void LocalStore::copy_to_sparse(
    Entry& entry,
    const at::Tensor& value,
    const at::Tensor& out,
    double seconds) {
  const Stopwatch watch;
  const PlainDispatch plain;
  out.copy_(value);
  note_written(out);
  const std::lock_guard lock(entry.mutex);
  count_rows(entry, sparse_impl(value).values(), seconds + watch.seconds());
}

void LocalStore::pull_rows(const char* op, c10::ArrayRef<RowPull> pulls) {
  Keys keys;
  Tensors outs;
  for (const auto& pull : pulls) {
    keys.list.push_back(pull.key);
    if (pull.out.defined()) {
      outs.append(pull.out);
    }
    outs.end_group();
  }
  const Entries entries = table_.find(op, keys);
  for (size_t i = 0; i < pulls.size(); ++i) {
    const Meta& meta = entries[i]->meta;
    check_still_fits(op, pulls[i], meta.sizes, meta.dtype);
  }
  if (has_shared_) {
    check_shared({op, keys, nullptr, &outs}, entries, /*takes_itself=*/false);
  }
  for (size_t i = 0; i < pulls.size(); ++i) {
    Entry& entry = *entries[i];
    const std::lock_guard lock(entry.mutex);
    const Stopwatch watch;
    if (entry.rows != nullptr) {
      pull_row_sparse(entry, pulls[i]);
      count_rows(entry, pulls[i].rows, watch.seconds());
      continue;
    }
    const bool is_whole = entry.slices.size() == 1;
    if (is_whole && entry.slices[0].home.device.is_cpu() &&
        pulls[i].rows.is_cpu()) {
      copy_rows(entry.slices[0].value, pulls[i]);
    } else if (is_whole || is_contiguous(entry)) {
      gather_rows(entry, streams_, pulls[i].ids, pulls[i].rows);
    } else {
      copy_rows(slices_.copy_of(entry, pulls[i].rows.device()), pulls[i]);
    }
    count_rows(entry, pulls[i].rows, watch.seconds());
  }
}

c10::Device LocalStore::row_device(const char* op, const Key& key) const {
  const EntryPtr entry = table_.find(op, key)[0];
  const std::lock_guard lock(entry->mutex);
  return entry->rows == nullptr && entry->slices.size() == 1
      ? entry->slices[0].home.device
      : c10::kCPU;
}

} // namespace torchkv

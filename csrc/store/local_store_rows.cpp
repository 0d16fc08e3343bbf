// Row-sparse keys of a LocalStore.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../core/in_progress.h"
#include "../core/plain_dispatch.h"
#include "../core/row_sparse.h"
#include "../core/sparse.h"
#include "../kernels/cpu/row_ids.h"
#include "../kernels/cpu/row_memory.h"
#include "../memory/row_slices.h"
#include "check.h"
#include "count_calls.h"
#include "local_store.h"
#include "parse_row_ids.h"
#include "row_values.h"

namespace torchkv {

namespace {

// What an updater must leave of the sparse tensor that it was given.
bool has_form_of(const Meta& meta, const at::Tensor& sparse) {
  return sparse.is_sparse() && sparse.sparse_dim() == 1 &&
      sparse.sizes() == c10::IntArrayRef(meta.sizes) &&
      sparse.scalar_type() == meta.dtype;
}

// The first row that the value cannot have.
std::optional<int64_t> first_bad_row(
    const Entry& entry,
    const at::Tensor& sparse) {
  const PlainDispatch plain;
  const at::Tensor ids = sparse_impl(sparse).indices()[0].contiguous();
  const auto* const all = ids.const_data_ptr<int64_t>();
  const int64_t bad =
      kernels::cpu::inspect_row_ids(all, ids.numel(), entry.meta.sizes[0])
          .first_bad;
  return bad < 0 ? std::nullopt : std::optional(all[bad]);
}

// The rows of `ids` that an updater has dropped from the sparse tensor that it
// was given, as by zero_(): they are zeros. Undefined if there is none.
at::Tensor dropped_rows(
    const Entry& entry,
    const at::Tensor& ids,
    const at::Tensor& sparse) {
  const PlainDispatch plain;
  const at::Tensor left = sparse_impl(sparse).indices()[0].contiguous();
  if (left.equal(ids)) {
    return {};
  }
  const auto* const begin = left.const_data_ptr<int64_t>();
  std::vector<int64_t> sorted(begin, begin + left.numel());
  std::sort(sorted.begin(), sorted.end());
  const auto* const given = ids.const_data_ptr<int64_t>();
  std::vector<int64_t> dropped;
  std::copy_if(
      given, given + ids.numel(), std::back_inserter(dropped), [&](int64_t id) {
        return !std::binary_search(sorted.begin(), sorted.end(), id);
      });
  if (dropped.empty()) {
    return {};
  }
  const auto count = static_cast<int64_t>(dropped.size());
  const at::Tensor of_dropped = at::empty({count}, ids.options());
  std::copy(
      dropped.begin(), dropped.end(), of_dropped.mutable_data_ptr<int64_t>());
  c10::SmallVector<int64_t, 4> sizes(entry.meta.sizes);
  sizes[0] = count;
  return make_sparse(
      of_dropped,
      at::zeros(sizes, ids.options().dtype(entry.meta.dtype)),
      entry.meta.sizes);
}

struct RowsOfUpdate {
  at::Tensor input;
  at::Tensor stored; // undefined for a dense key
};

// What an updater gets for the sums of these rows.
RowsOfUpdate rows_of_update(
    const Entry& entry,
    const at::Tensor& ids,
    const at::Tensor& sums) {
  const c10::InferenceMode normal(false);
  const PlainDispatch plain;
  const auto sparse = [&](const at::Tensor& of_ids, const at::Tensor& rows) {
    return make_sparse(of_ids, rows, entry.meta.sizes);
  };
  RowsOfUpdate result{sparse(ids.to(sums.device()), sums), {}};
  if (entry.rows != nullptr) {
    const at::Tensor rows = at::empty_like(sums);
    copy_rows(entry, ids, rows);
    result.stored = sparse(ids.clone(), rows);
  }
  return result;
}

} // namespace

EntryPtr LocalStore::insert_rows(
    const Key& key,
    const Meta& meta,
    const RowInit& init) {
  constexpr auto* op = "init_rows";
  const Where where{op, key};
  check_row_init(where, meta, init);
  table_.check_absent(op, key);
  Entries entries{c10::make_intrusive<Entry>(key, meta)};
  make_row_sparse(*entries[0], init);
  {
    const std::lock_guard lock(updater_mutex_);
    check_key_kind(op, updater_, key.kind());
    table_.insert(op, entries);
  }
  has_row_sparse_ = true;
  return entries[0];
}

void LocalStore::init_rows(
    const Key& key,
    const Meta& meta,
    const RowInit& init) {
  insert_rows(key, meta, init);
}

int64_t LocalStore::num_rows(const char* op, const Key& key) const {
  const EntryPtr entry = table_.find(op, key)[0];
  if (entry->rows == nullptr) {
    return Store::num_rows(op, key);
  }
  const std::lock_guard lock(entry->mutex);
  return entry->rows->size();
}

LocalStore::StoredRows LocalStore::rows_by_slot(const Key& key) const {
  const EntryPtr entry = table_.find("save", key)[0];
  const std::lock_guard lock(entry->mutex);
  const PlainDispatch plain;
  return {row_ids(*entry), entry->slices[0].value.alias()};
}

at::Tensor LocalStore::ids_by_slot(const Key& key, int64_t begin, int64_t count)
    const {
  const EntryPtr entry = table_.find("pull", key)[0];
  const std::lock_guard lock(entry->mutex);
  const PlainDispatch plain;
  const auto& ids = entry->rows->ids();
  const int64_t first = std::min(begin, entry->rows->size());
  const int64_t end = std::min(entry->rows->size() - first, count) + first;
  at::Tensor result = at::empty({end - first}, at::TensorOptions(c10::kLong));
  std::copy(
      ids.begin() + first,
      ids.begin() + end,
      result.mutable_data_ptr<int64_t>());
  return result;
}

void LocalStore::erase_rows(
    const char* op,
    const Keys& keys,
    c10::ArrayRef<at::Tensor> ids) {
  const Entries entries = table_.find(op, keys);
  for (const auto& entry : entries) {
    const Where where{op, entry->key};
    TORCHKV_CHECK_VALUE(
        entry->rows != nullptr,
        where,
        "expected a row-sparse key, but got a dense one, which keeps its rows");
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    const std::lock_guard lock(entries[i]->mutex);
    remove_rows(*entries[i], ids[i].const_data_ptr<int64_t>(), ids[i].numel());
  }
}

double LocalStore::update_rows(Batch& batch, OpaqueUpdater& opaque) {
  const Item& item = batch.items[0];
  Entry& entry = *item.entry;
  const at::Tensor ids = batch.find_distinct_rows();
  double seconds = 0;
  reducer_.sum_rows(
      item, ids.numel(), [&](at::Tensor& sum, at::Tensor& stored) {
        RowsOfUpdate rows = rows_of_update(entry, ids, sum);
        const InProgress<Store> updating(this);
        const Stopwatch watch;
        if (entry.rows == nullptr) {
          apply_updater(opaque, entry.key, rows.input, stored, entry.is_shared);
          Slices::note_written(entry);
        } else {
          update_own_rows(entry, opaque, ids, rows.input, rows.stored);
        }
        seconds = watch.seconds();
      });
  return seconds;
}

void LocalStore::update_own_rows(
    Entry& entry,
    OpaqueUpdater& opaque,
    const at::Tensor& ids,
    at::Tensor& input,
    at::Tensor& stored) {
  const auto write_all = [&] {
    const c10::InferenceMode normal(false);
    const at::Tensor dropped = dropped_rows(entry, ids, stored);
    if (dropped.defined()) {
      write_rows(entry, dropped);
    }
    write_rows(entry, stored);
  };
  try {
    apply_updater(opaque, entry.key, input, stored, /*is_shared=*/false);
  } catch (...) {
    if (has_form_of(entry.meta, stored) && !first_bad_row(entry, stored)) {
      write_all(); // what it has written stays
    }
    throw;
  }
  const std::optional<int64_t> bad = first_bad_row(entry, stored);
  TORCH_CHECK_INDEX(
      !bad,
      "push: expected the updater to write rows from 0 to ",
      entry.meta.sizes[0] - 1,
      ", but it wrote row ",
      bad.value_or(0),
      ' ',
      entry.key.context());
  write_all();
}

// In a new store.
void LocalStore::load_rows(
    const Key& key,
    const Tensors& value,
    const StoreState::Rows& rows) {
  const Where where{"load", key};
  const at::Tensor& given = value.flat[0];
  check_storable(where, given);
  check_storable(where, rows.ids);
  TORCHKV_CHECK_VALUE(
      given.dim() >= 1 && given.device().is_cpu() && rows.ids.dim() == 1 &&
          rows.ids.size(0) == given.size(0),
      where,
      "expected the ids of its rows, but got ids of shape ",
      rows.ids.sizes(),
      " for rows of shape ",
      given.sizes());
  const Meta meta = row_sparse_meta(
      where, rows.num_rows, given.sizes().slice(1), given.scalar_type());
  const PlainDispatch plain;
  auto encoding = std::make_shared<RowSparse>();
  encoding->ids = parse_row_ids(where, meta, rows.ids);
  encoding->sizes = meta.sizes;
  encoding->dtype = meta.dtype;
  const EntryPtr entry = insert_rows(key, meta, rows.init);
  const Tensors encoded =
      Tensors::encoded(given.contiguous(), std::move(encoding));
  const std::lock_guard lock(entry->mutex);
  entry->rows->reserve(given.size(0));
  replace_rows(Groups(Entries{entry}, encoded), 0, {});
  TORCHKV_CHECK_VALUE(
      entry->rows->size() == given.size(0),
      where,
      "expected distinct ids of rows, but got repeated ones");
}

void LocalStore::replace_rows(
    const Groups& values,
    size_t i,
    const Updater& updater) {
  has_row_sparse_ = true;
  Batch batch(values, i, i + 1);
  const Entry& entry = *values.entries()[i];
  const auto* const optimizer = std::get_if<OptimizerPtr>(&updater);
  const bool has_state =
      optimizer != nullptr && entry.generation == (*optimizer)->generation;
  const RuleSpec rule =
      has_state ? (*optimizer)->rule_of(entry.key) : RuleSpec();
  batch.find_rows(has_state ? &rule : nullptr);
  reducer_.update(batch.items);
  batch.keep_rows();
}

} // namespace torchkv

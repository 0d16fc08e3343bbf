// How keys come into a DistStore.
#include <ATen/ops/empty.h>

#include <memory>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../core/row_sparse.h"
#include "../core/sparse.h"
#include "../store/check.h"
#include "../store/local_store.h"
#include "../store/row_values.h"
#include "../store/shared_values.h"
#include "capture.h"
#include "dist_store.h"
#include "row_payload.h"

namespace torchkv::dist {
namespace {

// Without rows: servers have them.
EntryPtr make_entry(const Key& key, Meta meta, const RowInit& init) {
  auto entry = c10::make_intrusive<Entry>(key, std::move(meta));
  entry->rows = std::make_unique<RowTable>(init);
  return entry;
}

} // namespace

WorkPtr DistStore::insert(const Call& call) {
  refuse_sharing(call);
  check_not_capturing(call, runtime_);
  check_count(call.op, call.keys, *call.values);
  table_.check_absent(call.op, call.keys);
  check_key_kind(call.op, updater(), call.keys.list[0].kind());
  check_one_each(call, /*takes_rows=*/true);
  Entries entries;
  Request request(Request::Kind::kInit);
  for (size_t i = 0; i < call.keys.list.size(); ++i) {
    const Key& key = call.keys.list[i];
    const at::Tensor& value = call.values->flat[i];
    check_fits_messages(call.op, key, value.dim());
    if (is_sparse_coo(value)) {
      auto [entry, item] = make_table(call.op, key, value, call.options.whole);
      request.items.push_back(std::move(item));
      entries.push_back(std::move(entry));
      continue;
    }
    Meta meta{
        c10::SmallVector<int64_t, 4>(value.sizes()),
        value.scalar_type(),
        value.numel()};
    Request::Item item;
    item.key = key;
    item.spec = spec_of(meta, call.options.whole);
    if (rank() == 0) {
      const at::Tensor copy =
          Buffers().empty(value.sizes(), value.scalar_type());
      runtime_.copy(copy, value);
      item.value = blob_of(copy);
    }
    request.items.push_back(std::move(item));
    entries.push_back(c10::make_intrusive<Entry>(key, std::move(meta)));
  }
  check_no_repeats(call.op, entries);
  check_outs(call, entries);
  insert_entries(call.op, entries, std::move(request));
  return call.outs == nullptr ? nullptr : pull(call);
}

void DistStore::insert_entries(
    const char* op,
    const Entries& entries,
    Request request) {
  Keys keys;
  keys.single = entries.size() == 1;
  for (const auto& entry : entries) {
    keys.list.push_back(entry->key);
    has_tables_ = has_tables_ || entry->rows != nullptr;
  }
  // Until the servers have answered: one thread of several initializes a key.
  const KeyTable::Reservation reservation(table_, op, keys);
  std::vector<std::pair<Key, bool>> split;
  std::vector<Key> whole;
  for (const auto& item : request.items) {
    const auto places = place(
        item.key,
        item.spec,
        session_->config().num_servers,
        session_->config().split_bytes);
    if (places.size() > 1) {
      split.emplace_back(item.key, item.spec.is_row_sparse());
    }
    if (item.spec.whole) {
      whole.push_back(item.key);
    }
  }
  run(op, std::move(request));
  { // before others find the keys
    const std::lock_guard lock(updater_mutex_);
    split_keys_.insert(split.begin(), split.end());
    whole_keys_.insert(whole.begin(), whole.end());
  }
  table_.insert(op, entries);
}

// Of a row-sparse key: the rows that it begins with are rank 0's.
Request::Item DistStore::init_item(
    const Entry& entry,
    bool whole,
    const at::Tensor& ids,
    const at::Tensor& values) const {
  Request::Item item;
  item.key = entry.key;
  item.spec = spec_of(entry.meta, whole);
  item.spec.row_init = entry.rows->init;
  if (rank() == 0) {
    RowSparse rows;
    rows.ids = ids;
    item.codes = pack_rows(
        rows,
        values,
        item.spec,
        place(
            item.key,
            item.spec,
            session_->config().num_servers,
            session_->config().split_bytes),
        Buffers());
  }
  return item;
}

// Of a sparse value, whose repeated ids a store on one machine merges.
std::pair<EntryPtr, Request::Item> DistStore::make_table(
    const char* op,
    const Key& key,
    const at::Tensor& sparse,
    bool whole) const {
  LocalStore merged(runtime_, LocalStore::Options());
  const Tensors value(sparse);
  merged.insert({op, key, &value});
  const at::Tensor rows = merged.pull(key, CallOptions())[0];
  const PlainDispatch plain;
  EntryPtr entry =
      make_entry(key, merged.meta(op, key).value_or(Meta()), RowInit());
  Request::Item item = init_item(
      *entry,
      whole,
      sparse_impl(rows).indices()[0].contiguous(),
      sparse_impl(rows).values());
  return {std::move(entry), std::move(item)};
}

void DistStore::init_rows(
    const Key& key,
    const Meta& meta,
    const RowInit& init) {
  const PlainDispatch plain;
  c10::SmallVector<int64_t, 4> sizes(meta.sizes);
  sizes[0] = 0;
  insert_table(
      "init_rows",
      make_entry(key, meta, init),
      /*whole=*/false,
      at::empty({0}, at::TensorOptions(c10::kLong)),
      at::empty(sizes, at::TensorOptions(meta.dtype)));
}

void DistStore::insert_table(
    const char* op,
    const EntryPtr& entry,
    bool whole,
    const at::Tensor& ids,
    const at::Tensor& values) {
  const Key& key = entry->key;
  const Where where{op, key};
  check_row_init(where, entry->meta, entry->rows->init);
  check_fits_messages(op, key, static_cast<int64_t>(entry->meta.sizes.size()));
  table_.check_absent(op, key);
  check_key_kind(op, updater(), key.kind());
  Request request(Request::Kind::kInit);
  request.items.push_back(init_item(*entry, whole, ids, values));
  insert_entries(op, {entry}, std::move(request));
}

void DistStore::insert_saved(
    const char* op,
    const Key& key,
    const StoreState& state,
    size_t i,
    bool whole) {
  const StoreState::Rows& rows = state.rows.at(i);
  const at::Tensor& values = state.values[i];
  const Where where{op, key};
  const Meta meta = row_sparse_meta(
      where, rows.num_rows, values.sizes().slice(1), values.scalar_type());
  const EntryPtr entry = make_entry(key, meta, rows.init);
  if (began_from_snapshot_) { // whose rows, and more, init would keep
    insert_table(op, entry, whole, rows.ids, values.contiguous());
    erase(key);
  }
  insert_table(op, entry, whole, rows.ids, values.contiguous());
}

} // namespace torchkv::dist

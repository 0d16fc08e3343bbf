// Pulls of some rows, which servers select, and into sparse outs.
#include <ATen/ops/cat.h>
#include <ATen/ops/searchsorted.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "../core/plain_dispatch.h"
#include "../memory/layout.h"
#include "../store/check.h"
#include "../store/count_calls.h"
#include "../store/parse_row_ids.h"
#include "../store/row_pull.h"
#include "../store/row_values.h"
#include "capture.h"
#include "dist_store.h"
#include "row_query.h"

namespace torchkv::dist {
namespace {

// A key's rows, of all pulls of it.
struct RowsOfKey {
  std::vector<at::Tensor> asked; // ids
  at::Tensor ids; // distinct; undefined: those of the whole value
  at::Tensor rows; // that is pulled
};

// Whether an answer of these rows, with a query, takes fewer bytes than the
// value, and is not too large.
bool is_worth_a_query(
    const at::Tensor& ids,
    const KeySpec& spec,
    c10::ArrayRef<Place> places) {
  const int64_t cell = cell_size(spec, places);
  if (cell == 0) {
    return false;
  }
  const int64_t num_cells = ids.numel() * (row_size(spec) / cell);
  const int64_t num_bytes = num_cells * (8 + cell * spec.item_bytes);
  return num_bytes < spec.total * spec.item_bytes &&
      num_bytes <= kMostAnswerBytes;
}

} // namespace

// Into sparse outs, whole values. The call waits, also with async_op.
void DistStore::pull_sparse(const Call& call) {
  const PlainDispatch plain;
  const SparseOuts sparse = sparse_outs(call, table_.find(call.op, call.keys));
  Tensors outs; // dense ones in their places
  std::vector<at::Tensor> values; // of the sparse ones
  for (int64_t i = 0; i < call.keys.size(); ++i) {
    for (const auto& out : call.outs->of(i)) {
      if (is_sparse_coo(out)) {
        const Meta& meta = sparse[values.size()].first->meta;
        values.push_back(Buffers().empty(meta.sizes, meta.dtype));
      }
      outs.append(is_sparse_coo(out) ? values.back() : out);
    }
    outs.end_group();
  }
  CallOptions options = call.options;
  options.async_op = false;
  pull({call.op, call.keys, nullptr, &outs, options});
  for (size_t i = 0; i < values.size(); ++i) {
    const at::Tensor& out = sparse[i].second;
    out.copy_(sparse_of_all_rows(values[i]));
    note_written(out);
  }
}

void DistStore::pull_rows(const char* op, c10::ArrayRef<RowPull> pulls) {
  Keys keys;
  keys.single = false;
  for (const auto& pull : pulls) {
    keys.list.push_back(pull.key);
  }
  check_not_capturing({op, keys}, runtime_);
  const Entries entries = table_.find(op, keys);
  for (size_t i = 0; i < pulls.size(); ++i) {
    const Meta& meta = entries[i]->meta;
    check_still_fits(op, pulls[i], meta.sizes, meta.dtype);
  }
  raise_deferred(op, &keys);
  std::vector<RowPull> dense;
  for (size_t i = 0; i < pulls.size(); ++i) {
    if (entries[i]->rows == nullptr) {
      dense.push_back(pulls[i]);
    } else {
      pull_table(op, pulls[i]);
    }
  }
  if (!dense.empty()) {
    pull_dense_rows(op, dense);
  }
}

void DistStore::pull_dense_rows(const char* op, c10::ArrayRef<RowPull> pulls) {
  Keys keys; // distinct
  keys.single = false;
  std::vector<RowsOfKey> of_keys;
  std::vector<size_t> numbers; // of the pulls' keys
  ska::flat_hash_map<Key, size_t, KeyHash> found;
  for (const auto& pull : pulls) {
    const auto [at, is_new] = found.emplace(pull.key, of_keys.size());
    if (is_new) {
      keys.list.push_back(pull.key);
      of_keys.emplace_back();
    }
    of_keys[at->second].asked.push_back(pull.ids);
    numbers.push_back(at->second);
  }
  const Entries entries = table_.find(op, keys);
  const PlainDispatch plain;
  Request request(Request::Kind::kPull);
  // Whether rows can be received where they are asked for.
  bool is_direct = pulls.size() == keys.list.size();
  for (size_t i = 0; i < entries.size(); ++i) {
    const KeySpec spec = spec_of(entries[i]->meta, /*whole=*/false);
    const std::vector<Place> places = places_of(*entries[i]);
    RowsOfKey& of_key = of_keys[i];
    const at::Tensor ids = distinct_ids(
        of_key.asked.size() == 1 ? of_key.asked[0] : at::cat(of_key.asked));
    Request::Item item;
    item.key = keys.list[i];
    if (is_worth_a_query(ids, spec, places)) {
      of_key.ids = ids;
      item.queries = make_queries(ids, spec, places, staging_.buffers());
    }
    request.items.push_back(std::move(item));
    is_direct = is_direct && of_key.ids.defined() &&
        is_plain_cpu(pulls[i].rows) && pulls[i].rows.is_contiguous() &&
        ids.equal(pulls[i].ids);
  }
  Outs outs;
  outs.keys = keys;
  for (size_t i = 0; i < entries.size(); ++i) {
    RowsOfKey& of_key = of_keys[i];
    Meta meta = entries[i]->meta;
    if (of_key.ids.defined()) {
      meta.sizes[0] = of_key.ids.numel();
    }
    of_key.rows = is_direct
        ? pulls[i].rows
        : Buffers().empty(meta.sizes, meta.dtype); // of varying sizes
    outs.tensors.push_back({of_key.rows});
    outs.metas.push_back(std::move(meta));
  }
  finish({op, keys}, begin(op, std::move(request)), std::move(outs));
  for (size_t i = 0; i < pulls.size(); ++i) {
    const RowsOfKey& of_key = of_keys[numbers[i]];
    if (!is_direct) {
      RowPull pull = pulls[i];
      if (of_key.ids.defined()) {
        pull.ids = at::searchsorted(of_key.ids, pull.ids);
      }
      copy_rows(of_key.rows, pull);
    }
    Entry& entry = *entries[numbers[i]];
    const std::lock_guard lock(entry.mutex);
    count_rows(entry, pulls[i].rows, /*seconds=*/0);
  }
}

} // namespace torchkv::dist

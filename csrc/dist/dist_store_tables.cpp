// Calls on row-sparse keys of a DistStore, whose rows are on the servers.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../kernels/cpu/row_memory.h"
#include "../memory/layout.h"
#include "../store/check.h"
#include "../store/count_calls.h"
#include "../store/parse_row_ids.h"
#include "../store/row_values.h"
#include "capture.h"
#include "dist_store.h"
#include "row_payload.h"
#include "row_query.h"

namespace torchkv::dist {
namespace {

at::Tensor empty_like_rows(const Meta& meta, int64_t count) {
  const PlainDispatch plain;
  c10::SmallVector<int64_t, 4> sizes(meta.sizes);
  sizes[0] = count;
  return at::empty(sizes, at::TensorOptions(meta.dtype));
}

// In the order of the slices, and of the ids in each: the numbers of ids.
at::Tensor numbers_by_slice(const at::Tensor& ids, size_t num_slices) {
  const auto* const id = ids.const_data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> of_slices(num_slices);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    of_slices[slice_of_row(id[i], num_slices)].push_back(i);
  }
  const at::Tensor result = at::empty({ids.numel()}, ids.options());
  auto* next = result.mutable_data_ptr<int64_t>();
  for (const auto& numbers : of_slices) {
    next = std::copy(numbers.begin(), numbers.end(), next);
  }
  return result;
}

bool has_sparse(c10::ArrayRef<at::Tensor> outs) {
  return std::any_of(outs.begin(), outs.end(), is_sparse_coo);
}

} // namespace

// -- questions to the servers

// Waits for what the servers of the key's slices answer, one after the other.
void DistStore::ask(
    const char* op,
    const Key& key,
    std::vector<Request::Query> queries,
    const at::Tensor& answers,
    int64_t min_version) const {
  Request request(Request::Kind::kPull);
  Request::Item item;
  item.key = key;
  item.queries = std::move(queries);
  item.min_version = std::max<int64_t>(0, min_version);
  request.items.push_back(std::move(item));
  Outs outs;
  outs.keys = Keys({key});
  outs.tensors.push_back({answers});
  outs.metas.push_back(
      {c10::SmallVector<int64_t, 4>(answers.sizes()),
       answers.scalar_type(),
       answers.numel()});
  finish({op, key}, begin(op, std::move(request)), std::move(outs));
}

// How many rows each slice has.
std::vector<int64_t> DistStore::num_rows_of_slices(
    const char* op,
    const Entry& entry,
    int64_t min_version) const {
  const PlainDispatch plain;
  const size_t num_slices = places_of(entry).size();
  std::vector<Request::Query> queries;
  queries.reserve(num_slices);
  for (size_t i = 0; i < num_slices; ++i) {
    queries.push_back({pack_count_query(staging_.buffers()), sizeof(int64_t)});
  }
  const at::Tensor answers = at::empty(
      {static_cast<int64_t>(num_slices)}, at::TensorOptions(c10::kLong));
  ask(op, entry.key, std::move(queries), answers, min_version);
  const auto* const counts = answers.const_data_ptr<int64_t>();
  return {counts, counts + num_slices};
}

// The ids of each slice's rows, in the order in which its server has them; with
// `only_own`, none of other ranks' servers.
std::vector<at::Tensor> DistStore::ids_of_slices(
    const char* op,
    const Entry& entry,
    int64_t min_version,
    bool only_own) const {
  const PlainDispatch plain;
  auto counts = num_rows_of_slices(op, entry, min_version);
  const auto places = places_of(entry);
  for (size_t i = 0; only_own && i < places.size(); ++i) {
    counts[i] = places[i].server == rank() ? counts[i] : 0;
  }
  std::vector<std::vector<at::Tensor>> found(counts.size());
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  int64_t begin = 0;
  do {
    std::vector<Request::Query> queries;
    std::vector<int64_t> asked;
    for (const int64_t count : counts) {
      asked.push_back(
          std::clamp<int64_t>(count - begin, 0, TableQueries::kMostIds));
      queries.push_back(
          {pack_ids_query(begin, asked.back(), staging_.buffers()),
           static_cast<size_t>(asked.back()) * sizeof(int64_t)});
    }
    const at::Tensor answers = at::empty(
        {std::accumulate(asked.begin(), asked.end(), int64_t{0})},
        at::TensorOptions(c10::kLong));
    ask(op, entry.key, std::move(queries), answers, min_version);
    int64_t first = 0;
    for (size_t i = 0; i < asked.size(); first += asked[i++]) {
      const at::Tensor ids = answers.narrow(0, first, asked[i]);
      const auto* const all = ids.const_data_ptr<int64_t>();
      // Fewer, if another rank had rows forgotten meanwhile.
      const auto known = std::find(all, all + asked[i], -1) - all;
      found[i].push_back(ids.narrow(0, 0, known));
    }
    begin += TableQueries::kMostIds;
  } while (begin < most);
  std::vector<at::Tensor> result;
  result.reserve(found.size());
  for (const auto& of_slice : found) {
    result.push_back(at::cat(of_slice));
  }
  return result;
}

// Rows of ascending, distinct ids, those that the key does not have, too.
// `rows` is contiguous in CPU memory.
void DistStore::pull_table_rows(
    const char* op,
    const Entry& entry,
    const at::Tensor& ids,
    const at::Tensor& rows,
    int64_t min_version) const {
  const PlainDispatch plain;
  const auto places = places_of(entry);
  const KeySpec spec = spec_of(entry.meta, places.size() == 1);
  const int64_t row_bytes = row_size(spec) * spec.item_bytes;
  const int64_t most = std::max<int64_t>(1, kMostAnswerBytes / (8 + row_bytes));
  for (int64_t begin = 0; begin < ids.numel(); begin += most) {
    const int64_t count = std::min(most, ids.numel() - begin);
    const at::Tensor some = ids.narrow(0, begin, count);
    const at::Tensor out = rows.narrow(0, begin, count);
    auto queries = make_queries(some, spec, places, staging_.buffers());
    if (places.size() == 1) {
      ask(op, entry.key, std::move(queries), out, min_version);
      continue;
    }
    const at::Tensor answers = empty_like_rows(entry.meta, count);
    ask(op, entry.key, std::move(queries), answers, min_version);
    const at::Tensor numbers = numbers_by_slice(some, places.size());
    if (answers.numel() != 0) {
      kernels::cpu::scatter_rows(
          {static_cast<char*>(out.mutable_data_ptr()),
           row_size(spec),
           entry.meta.dtype},
          numbers.const_data_ptr<int64_t>(),
          count,
          static_cast<const char*>(answers.const_data_ptr()));
    }
  }
}

DistStore::Table DistStore::pull_table(
    const char* op,
    Entry& entry,
    int64_t min_version) const {
  const PlainDispatch plain;
  Table table;
  // Distinct, also if rows were forgotten between two answers.
  table.ids = distinct_ids(at::cat(ids_of_slices(op, entry, min_version)));
  table.values = empty_like_rows(entry.meta, table.ids.numel());
  pull_table_rows(op, entry, table.ids, table.values, min_version);
  const std::lock_guard lock(entry.mutex);
  count_rows(entry, table.values, /*seconds=*/0);
  return table;
}

int64_t DistStore::num_rows(const char* op, const Key& key) const {
  const EntryPtr entry = table_.find(op, key)[0];
  if (entry->rows == nullptr) {
    return Store::num_rows(op, key);
  }
  const auto counts = num_rows_of_slices(op, *entry, /*min_version=*/0);
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// -- calls

void DistStore::pull_table(const char* op, const RowPull& pull) const {
  const PlainDispatch plain;
  Entry& entry = *table_.find(op, pull.key)[0];
  const at::Tensor ids = distinct_ids(pull.ids);
  const bool is_direct = is_plain_cpu(pull.rows) && pull.rows.is_contiguous() &&
      ids.equal(pull.ids);
  const at::Tensor rows =
      is_direct ? pull.rows : empty_like_rows(entry.meta, ids.numel());
  pull_table_rows(op, entry, ids, rows, /*min_version=*/0);
  if (!is_direct) {
    RowPull numbered = pull;
    numbered.ids = at::searchsorted(ids, pull.ids);
    copy_rows(rows, numbered);
  }
  const std::lock_guard lock(entry.mutex);
  count_rows(entry, pull.rows, /*seconds=*/0);
}

// What the sparse outs of a row-sparse key get; ValueError unless they have all
// rows.
DistStore::Table DistStore::pull_for(
    const char* op,
    Entry& entry,
    c10::ArrayRef<at::Tensor> outs,
    int64_t min_version) const {
  Table table = pull_table(op, entry, min_version);
  for (const auto& out : outs) {
    if (is_sparse_coo(out)) {
      check_rows_fit({op, entry.key}, table.ids, out);
    }
  }
  return table;
}

// Into outs of a row-sparse key: `table` into the sparse ones.
void DistStore::write_table(
    const char* op,
    Entry& entry,
    const Table& table,
    c10::ArrayRef<at::Tensor> outs,
    int64_t min_version) const {
  const PlainDispatch plain;
  for (const auto& out : outs) {
    if (is_sparse_coo(out)) {
      out.copy_(make_sparse(table.ids, table.values, out.sizes()));
      note_written(out);
    }
  }
  if (std::all_of(outs.begin(), outs.end(), is_sparse_coo)) {
    return;
  }
  const at::Tensor whole = empty_like_rows(entry.meta, entry.meta.sizes[0]);
  const at::Tensor all =
      at::arange(entry.meta.sizes[0], at::TensorOptions(c10::kLong));
  pull_table_rows(op, entry, all, whole, min_version);
  for (const auto& out : outs) {
    if (!is_sparse_coo(out)) {
      runtime_.copy(out, whole);
      note_written(out);
      const std::lock_guard lock(entry.mutex);
      count_rows(entry, out, /*seconds=*/0);
    }
  }
}

// A call some of whose keys are row-sparse. It waits, also with async_op.
WorkPtr DistStore::pull_with_tables(const Call& call, const Entries& entries) {
  check_not_capturing(call, runtime_);
  sparse_outs(call, entries); // checks them
  const auto without_sparse = dense_outs(call);
  const Call to_dense{
      call.op,
      without_sparse ? without_sparse->keys : call.keys,
      nullptr,
      without_sparse ? &without_sparse->outs : call.outs,
      call.options};
  if (to_dense.keys.size() != 0) {
    find(to_dense);
  }
  raise_deferred(call.op, &call.keys);
  CallOptions options = call.options;
  options.async_op = false;
  // Whose outs may be refused: before any is written.
  std::vector<Table> tables(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto outs = call.outs->of(static_cast<int64_t>(i));
    if (entries[i]->rows != nullptr && has_sparse(outs)) {
      tables[i] = pull_for(call.op, *entries[i], outs, options.min_version);
    }
  }
  // In order, as outs may overlap; dense keys that follow one another together.
  for (size_t i = 0; i < entries.size();) {
    Keys keys;
    keys.single = false;
    Tensors outs;
    for (; i < entries.size() && entries[i]->rows == nullptr; ++i) {
      keys.list.push_back(entries[i]->key);
      for (const auto& out : call.outs->of(static_cast<int64_t>(i))) {
        outs.append(out);
      }
      outs.end_group();
    }
    if (keys.size() != 0) {
      pull({call.op, keys, nullptr, &outs, options});
      continue;
    }
    write_table(
        call.op,
        *entries[i],
        tables[i],
        call.outs->of(static_cast<int64_t>(i)),
        options.min_version);
    ++i;
  }
  return call.options.async_op
      ? c10::make_intrusive<Work>(
            runtime_, Work::Parts(), std::vector<at::Tensor>())
      : nullptr;
}

// Dense values for row-sparse keys are pushed as all their rows. With outs, the
// call is a push and a pull.
WorkPtr DistStore::merge_with_tables(
    const Call& given,
    const Entries& entries) {
  check_count(given.op, given.keys, *given.values);
  Tensors values;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Where where{given.op, entries[i]->key};
    for (const auto& value : given.values->of(static_cast<int64_t>(i))) {
      const bool is_spread =
          entries[i]->rows != nullptr && !is_sparse_coo(value);
      if (is_spread) {
        check_storable(where, value);
        check_shape(where, entries[i]->meta, value.sizes());
      }
      const PlainDispatch plain;
      values.append(is_spread ? sparse_of_all_rows(value) : value);
    }
    values.end_group();
  }
  Call push{given.op, given.keys, &values, nullptr, given.options};
  if (given.outs == nullptr) {
    return merge_values(push);
  }
  check_outs({given.op, given.keys, nullptr, given.outs}, entries);
  push.options.async_op = true; // its error is this call's
  merge_values(push)->wait();
  return pull({given.op, given.keys, nullptr, given.outs, given.options});
}

void DistStore::erase_rows(
    const char* op,
    const Keys& keys,
    c10::ArrayRef<at::Tensor> ids) {
  const Entries entries = table_.find(op, keys);
  check_no_repeats(op, entries);
  Request request(Request::Kind::kPush);
  for (size_t i = 0; i < entries.size(); ++i) {
    const Where where{op, entries[i]->key};
    TORCHKV_CHECK_VALUE(
        entries[i]->rows != nullptr,
        where,
        "expected a row-sparse key, but got a dense one, which keeps its rows");
    const auto places = places_of(*entries[i]);
    Request::Item item;
    item.key = entries[i]->key;
    item.codes = pack_ids(
        RowForm::kForgotten,
        distinct_ids(ids[i]),
        spec_of(entries[i]->meta, places.size() == 1),
        places,
        staging_.buffers());
    item.dtype = static_cast<int32_t>(entries[i]->meta.dtype);
    request.items.push_back(std::move(item));
  }
  run(op, std::move(request));
}

} // namespace torchkv::dist

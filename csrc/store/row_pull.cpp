#include "row_pull.h"

#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <c10/util/flat_hash_map.h>

#include <utility>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "check.h"
#include "parse_row_ids.h"
#include "row_values.h"
#include "store.h"

namespace torchkv {
namespace {

using Sizes = c10::SmallVector<int64_t, 4>;

// (*first, *value.shape[1:])
Sizes with_rows_of(c10::IntArrayRef first, const Meta& meta) {
  Sizes sizes(first);
  sizes.append(meta.sizes.begin() + 1, meta.sizes.end());
  return sizes;
}

// As the outs of a pull of a value with this shape.
void check_dense_out(
    const Where& where,
    const Meta& meta,
    Sizes sizes,
    const at::Tensor& out) {
  int64_t count = 1;
  for (const int64_t size : sizes) {
    count *= size;
  }
  const Entries entries{c10::make_intrusive<Entry>(
      where.key, Meta{std::move(sizes), meta.dtype, count})};
  const Keys key(where.key);
  const Tensors outs(out);
  check_outs({where.op, key, nullptr, &outs}, entries);
}

// What one out gets.
struct Lookup {
  at::Tensor out; // undefined: a new tensor
  c10::Device device; // of the out
  RowPull pull;
  Sizes sizes; // of a dense out
};

// Row ids stay on the accelerator on which the store reads them, unchecked.
Lookup make_lookup(
    const Store& store,
    const Where& where,
    const Meta& meta,
    const at::Tensor& given,
    const at::Tensor& out,
    UncheckedRowIds& unchecked) {
  const bool to_sparse = out.defined() && out.layout() == c10::kSparse;
  const bool are_there = !to_sparse && given.defined() && !given.is_cpu() &&
      store.row_device(where.op, where.key) == given.device();
  const at::Tensor ids = are_there ? unchecked.add(where, meta, given)
                                   : parse_row_ids(where, meta, given);
  Lookup result{
      out,
      out.defined() ? out.device() : given.device(),
      {where.key, meta.sizes[0], {}, {}, {}},
      with_rows_of(given.sizes(), meta)};
  if (to_sparse) {
    check_sparse_out(where, meta, out);
  } else if (out.defined()) {
    check_dense_out(where, meta, result.sizes, out);
    result.pull.out = out;
  }
  const PlainDispatch plain;
  result.pull.ids = to_sparse ? distinct_ids(ids) : ids;
  if (to_sparse && ids.numel() != 0) { // of an unlimited value, of any shape
    const int64_t last =
        result.pull.ids.const_data_ptr<int64_t>()[result.pull.ids.numel() - 1];
    TORCHKV_CHECK_VALUE(
        last < out.size(0),
        where,
        "expected a sparse out with row ",
        last,
        ", but got one of shape ",
        out.sizes());
  }
  return result;
}

// Memory for the rows: the out's own where possible.
void allocate_rows(const Meta& meta, Lookup& lookup) {
  const PlainDispatch plain;
  RowPull& pull = lookup.pull;
  const Sizes sizes = with_rows_of({pull.ids.numel()}, meta);
  const at::Tensor& out = pull.out;
  if (out.defined() && out.is_contiguous() && out.scalar_type() == meta.dtype &&
      !out.is_conj() && !out.is_neg()) {
    pull.rows = out.view(sizes);
    return;
  }
  pull.rows =
      at::empty(sizes, at::TensorOptions(lookup.device).dtype(meta.dtype));
}

// Copies ids that are in the memory of an out.
void keep_ids(std::vector<Lookup>& lookups) {
  ska::flat_hash_set<const c10::StorageImpl*> of_outs;
  for (const auto& lookup : lookups) {
    if (lookup.pull.out.defined()) {
      of_outs.insert(lookup.pull.out.storage().unsafeGetStorageImpl());
    }
  }
  const PlainDispatch plain;
  for (auto& lookup : lookups) {
    at::Tensor& ids = lookup.pull.ids;
    if (of_outs.count(ids.storage().unsafeGetStorageImpl()) != 0) {
      ids = ids.clone();
    }
  }
}

void write_out(const Lookup& lookup) {
  const PlainDispatch plain;
  const RowPull& pull = lookup.pull;
  if (pull.out.defined()) {
    if (pull.rows.storage().unsafeGetStorageImpl() !=
        pull.out.storage().unsafeGetStorageImpl()) {
      at::Tensor out = pull.out;
      out.copy_(pull.rows.view(lookup.sizes));
    }
    note_written(pull.out);
    return;
  }
  at::Tensor out = lookup.out;
  note_written(out);
  // The ids are sorted and distinct.
  out.copy_(
      at::_sparse_coo_tensor_with_dims_and_tensors(
          /*sparse_dim=*/1,
          pull.rows.dim() - 1,
          out.sizes(),
          pull.ids.to(pull.rows.device()).unsqueeze(0),
          pull.rows,
          pull.rows.options().layout(c10::kSparse),
          /*is_coalesced=*/true));
}

Meta meta_of(const Store& store, const char* op, const Key& key) {
  auto meta = store.meta(op, key);
  if (!meta) {
    throw_unknown_key(op, key);
  }
  const Where where{op, key};
  TORCHKV_CHECK_VALUE(
      !meta->sizes.empty(),
      where,
      "expected a value with rows, but got one without dimensions");
  return *std::move(meta);
}

} // namespace

void check_sparse_out(
    const Where& where,
    const Meta& meta,
    const at::Tensor& out) {
  check_rows_shape(where, meta, out.sizes());
  TORCHKV_CHECK_VALUE(
      out.sparse_dim() == 1,
      where,
      "expected an out with one sparse dimension, but got ",
      out.sparse_dim());
  TORCHKV_CHECK_TYPE(
      c10::canCast(meta.dtype, out.scalar_type()),
      where,
      "expected an out that ",
      dtype_name(meta.dtype),
      " converts to, but got ",
      dtype_name(out.scalar_type()));
}

int64_t Store::num_rows(const char* op, const Key& key) const {
  return meta_of(*this, op, key).sizes[0];
}

void Store::pull_rows(const char* op, c10::ArrayRef<RowPull> pulls) {
  for (const auto& row_pull : pulls) {
    const at::Tensor whole = pull(row_pull.key, CallOptions())[0];
    check_still_fits(op, row_pull, whole.sizes(), whole.scalar_type());
    copy_rows(whole, row_pull);
  }
}

std::vector<at::Tensor> pull_rows(
    Store& store,
    const char* op,
    const Keys& keys,
    const Tensors* outs,
    const Tensors& row_ids) {
  check_count(op, keys, row_ids);
  if (outs != nullptr) {
    check_count(op, keys, *outs);
  }
  std::vector<Lookup> lookups;
  std::vector<Meta> metas; // of the lookups
  UncheckedRowIds unchecked;
  for (int64_t i = 0; i < keys.size(); ++i) {
    const Where where{op, keys.list[i]};
    const Meta meta = meta_of(store, op, where.key);
    const auto ids = row_ids.of(i);
    const size_t count = outs == nullptr ? 1 : outs->of(i).size();
    TORCHKV_CHECK_VALUE(
        ids.size() == 1 || ids.size() == count,
        where,
        "expected one tensor of row ids",
        count == 1 ? "" : c10::str(", or ", count, ", one for each out"),
        ", but got ",
        ids.size());
    for (size_t j = 0; j < count; ++j) {
      lookups.push_back(make_lookup(
          store,
          where,
          meta,
          ids.size() == 1 ? ids[0] : ids[j],
          outs == nullptr ? at::Tensor() : outs->of(i)[j],
          unchecked));
      metas.push_back(meta);
    }
  }
  unchecked.check(op);
  keep_ids(lookups);
  std::vector<RowPull> pulls;
  pulls.reserve(lookups.size());
  for (size_t i = 0; i < lookups.size(); ++i) {
    allocate_rows(metas[i], lookups[i]);
    pulls.push_back(lookups[i].pull);
  }
  store.pull_rows(op, pulls);
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < lookups.size(); ++i) {
    if (outs == nullptr) {
      results.push_back(pulls[i].rows.view(lookups[i].sizes));
    } else {
      write_out(lookups[i]);
    }
  }
  return results;
}

void copy_rows(const at::Tensor& whole, const RowPull& pull) {
  const PlainDispatch plain;
  const at::Tensor ids = pull.ids.to(whole.device());
  at::Tensor rows = pull.rows;
  if (whole.device() == rows.device()) {
    at::index_select_out(rows, whole, 0, ids);
  } else {
    rows.copy_(at::index_select(whole, 0, ids));
  }
}

SparseOuts sparse_outs(const Call& call, const Entries& entries) {
  SparseOuts sparse;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Where where{call.op, entries[i]->key};
    const Meta& meta = entries[i]->meta;
    for (const auto& out : call.outs->of(static_cast<int64_t>(i))) {
      if (is_sparse_coo(out)) {
        TORCHKV_CHECK_VALUE(
            !meta.sizes.empty(),
            where,
            "expected a value with rows for a sparse out, but got one without "
            "dimensions");
        check_sparse_out(where, meta, out);
        sparse.emplace_back(entries[i], out);
      }
    }
  }
  return sparse;
}

void check_still_fits(
    const char* op,
    const RowPull& pull,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype) {
  const Where where{op, pull.key};
  TORCHKV_CHECK_VALUE(
      !sizes.empty() && sizes[0] == pull.num_rows &&
          sizes.slice(1) == pull.rows.sizes().slice(1) &&
          dtype == pull.rows.scalar_type(),
      where,
      "expected a value that stays, but another thread has replaced the key");
}

} // namespace torchkv

#include "table_queries.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../core/plain_dispatch.h"
#include "../kernels/cpu/row_memory.h"
#include "row_payload.h"
#include "snapshot_files.h"

namespace torchkv::dist {
namespace {

at::Tensor numbers(int64_t count, int64_t value) {
  return at::full({count}, value, at::TensorOptions(c10::kLong));
}

bool is_live(const Value& value) {
  const auto* const stored = dynamic_cast<const StoredValue*>(&value);
  return stored != nullptr && stored->is_live;
}

} // namespace

TableQueries::TableQueries(
    Applier& applier,
    const Config& config,
    Buffers buffers)
    : applier_(applier), config_(config), buffers_(std::move(buffers)) {}

void TableQueries::copy_bytes(
    const Value& value,
    int64_t begin,
    int64_t size,
    void* out) const {
  copy_range(
      value.pieces,
      config_.piece_bytes,
      static_cast<size_t>(begin),
      static_cast<size_t>(size),
      static_cast<std::byte*>(out));
}

// Of a value that is not live; ValueError if it is not one of rows.
int64_t TableQueries::num_rows_in(const KeySpec& spec, const Value& value)
    const {
  int64_t num_bytes = 0;
  for (const Blob& piece : value.pieces) {
    num_bytes += static_cast<int64_t>(piece.size());
  }
  int64_t count = -1;
  if (num_bytes >= kIdsBegin) {
    copy_bytes(value, kIdsBegin - 8, 8, &count);
  }
  const int64_t bytes = row_bytes(spec);
  TORCH_CHECK_VALUE(
      count >= 0 && count <= num_bytes / 8 &&
          count <= num_bytes / std::max<int64_t>(bytes, 1) &&
          cells_begin(count) + count * bytes == num_bytes,
      "expected the rows that a key begins with, but got ",
      num_bytes,
      " other bytes");
  return count;
}

// REQUIRES: num_rows_in.
std::vector<int64_t> TableQueries::ids_in_payload(
    const Value& value,
    int64_t begin,
    int64_t count) const {
  std::vector<int64_t> ids(static_cast<size_t>(count));
  copy_bytes(value, kIdsBegin + 8 * begin, 8 * count, ids.data());
  return ids;
}

const RowTable& TableQueries::index_of(
    const SliceId& slice,
    const KeySpec& spec,
    const Value& value) {
  const auto found = indices_.find(slice);
  if (found != indices_.end() && found->second->kid == value.kid) {
    return found->second->rows;
  }
  auto index = std::make_unique<Index>();
  index->kid = value.kid;
  const int64_t count = num_rows_in(spec, value);
  const std::vector<int64_t> ids = ids_in_payload(value, 0, count);
  std::vector<int64_t> slots(ids.size());
  index->rows.reserve(count);
  index->rows.find(ids.data(), count, slots.data());
  index->rows.add(ids.data(), count, slots.data());
  return (indices_[slice] = std::move(index))->rows;
}

// Of a value that is not live.
at::Tensor TableQueries::rows_of(
    const SliceId& slice,
    const KeySpec& spec,
    const Value& value,
    const at::Tensor& ids) {
  const RowTable& table = index_of(slice, spec, value);
  const int64_t count = ids.numel();
  const auto* const id = ids.const_data_ptr<int64_t>();
  std::vector<int64_t> slots(static_cast<size_t>(count));
  table.find(id, count, slots.data());
  kernels::cpu::RowMemory row;
  row.row_size = row_size(spec);
  row.dtype = static_cast<c10::ScalarType>(spec.dtype);
  TORCH_CHECK_VALUE(
      spec.row_init->id == RowInit::Id::kZeros ||
          kernels::cpu::can_init(row.dtype),
      "expected rows that can have an initial value, but got dtype ",
      row.dtype);
  const int64_t bytes = row.row_bytes();
  const at::Tensor rows = buffers_.empty_codes(count * bytes);
  row.data = static_cast<char*>(rows.mutable_data_ptr());
  for (int64_t i = 0; i < count && bytes != 0; ++i, row.data += bytes) {
    const int64_t slot = slots[static_cast<size_t>(i)];
    if (slot < 0) {
      kernels::cpu::init_rows(row, id + i, 1, *spec.row_init);
      continue;
    }
    copy_range(
        value.pieces,
        config_.piece_bytes,
        static_cast<size_t>(cells_begin(table.size()) + slot * bytes),
        static_cast<size_t>(bytes),
        reinterpret_cast<std::byte*>(row.data));
  }
  return rows;
}

// -1 after the last.
at::Tensor TableQueries::ids_in_range(
    const SliceId& slice,
    const KeySpec& spec,
    const Value& value,
    int64_t begin,
    int64_t count) {
  at::Tensor result = numbers(count, -1);
  auto* const out = result.mutable_data_ptr<int64_t>();
  if (is_live(value)) {
    const at::Tensor ids = applier_.row_ids(slice.key, begin, count);
    const auto* const known = ids.const_data_ptr<int64_t>();
    std::copy(known, known + ids.numel(), out);
  } else {
    const int64_t size = num_rows_in(spec, value);
    const int64_t first = std::min(begin, size);
    const auto ids =
        ids_in_payload(value, first, std::min(size - first, count));
    std::copy(ids.begin(), ids.end(), out);
  }
  return result;
}

at::Tensor TableQueries::rows_with(
    const SliceId& slice,
    const KeySpec& spec,
    const Value& value,
    const at::Tensor& ids) {
  if (!is_live(value)) {
    return rows_of(slice, spec, value, ids);
  }
  c10::SmallVector<int64_t, 4> sizes(spec.sizes);
  sizes[0] = ids.numel();
  at::Tensor rows =
      buffers_.empty_codes(ids.numel() * row_size(spec) * spec.item_bytes);
  const auto dtype = static_cast<c10::ScalarType>(spec.dtype);
  applier_.pull_rows(
      {slice.key,
       spec.sizes[0],
       ids,
       tensor_of(blob_of(rows), sizes, dtype, buffers_),
       {}});
  return rows;
}

ValuePtr TableQueries::answer(
    const SliceId& slice,
    const KeySpec& spec,
    const Value& value,
    const Blobs& query) {
  const PlainDispatch plain;
  if (is_live(value)) {
    indices_.erase(slice);
  }
  const Blob payload =
      query.size() == 1 ? query[0] : blob_of(joined_codes(query, buffers_));
  at::Tensor result;
  if (has_form(payload, RowForm::kCount)) {
    result = numbers(
        1,
        is_live(value) ? applier_.num_rows(slice.key)
                       : num_rows_in(spec, value));
  } else if (has_form(payload, RowForm::kIds)) {
    const int64_t begin = begin_in(payload);
    const int64_t count = number_in(payload);
    if (begin < 0 || count < 0 || count > kMostIds) {
      return nullptr;
    }
    result = ids_in_range(slice, spec, value, begin, count);
  } else {
    const auto ids = asked_ids(payload, spec.sizes[0]);
    const int64_t most =
        kMostAnswerBytes / std::max<int64_t>(row_bytes(spec), 1);
    if (!ids || ids->numel() > std::max<int64_t>(most, 1)) {
      return nullptr;
    }
    result = rows_with(slice, spec, value, *ids);
  }
  auto answer = std::make_shared<Value>();
  answer->pieces = cut(blob_of(result), config_.piece_bytes);
  return answer;
}

} // namespace torchkv::dist

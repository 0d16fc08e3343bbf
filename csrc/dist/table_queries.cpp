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

const RowTable& TableQueries::index_of(
    const SliceId& slice,
    const KeySpec& spec,
    const Value& value) {
  const auto found = indices_.find(slice);
  if (found != indices_.end() && found->second->kid == value.kid) {
    return found->second->rows;
  }
  const int64_t row_bytes = row_size(spec) * spec.item_bytes;
  auto index = std::make_unique<Index>();
  index->kid = value.kid;
  const auto copy = [&](int64_t begin, int64_t size, void* out) {
    copy_range(
        value.pieces,
        config_.piece_bytes,
        static_cast<size_t>(begin),
        static_cast<size_t>(size),
        static_cast<std::byte*>(out));
  };
  int64_t num_bytes = 0;
  for (const Blob& piece : value.pieces) {
    num_bytes += static_cast<int64_t>(piece.size());
  }
  int64_t count = -1;
  if (num_bytes >= kIdsBegin) {
    copy(kIdsBegin - 8, 8, &count);
  }
  TORCH_CHECK_VALUE(
      count >= 0 && count <= num_bytes / 8 &&
          cells_begin(count) + count * row_bytes == num_bytes,
      "expected the rows that the key begins with, but got ",
      num_bytes,
      " other bytes ",
      slice.key.context());
  std::vector<int64_t> ids(static_cast<size_t>(count));
  copy(kIdsBegin, 8 * count, ids.data());
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
  const int64_t row_bytes = row.row_bytes();
  const at::Tensor rows = buffers_.empty_codes(count * row_bytes);
  row.data = static_cast<char*>(rows.mutable_data_ptr());
  for (int64_t i = 0; i < count && row_bytes != 0; ++i, row.data += row_bytes) {
    const int64_t slot = slots[static_cast<size_t>(i)];
    if (slot < 0) {
      kernels::cpu::init_rows(row, id + i, 1, *spec.row_init);
      continue;
    }
    copy_range(
        value.pieces,
        config_.piece_bytes,
        static_cast<size_t>(cells_begin(table.size()) + slot * row_bytes),
        static_cast<size_t>(row_bytes),
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
    const std::vector<int64_t>& ids = index_of(slice, spec, value).ids();
    const auto size = static_cast<int64_t>(ids.size());
    const int64_t first = std::min(begin, size);
    const int64_t end = std::min(size - first, count) + first;
    std::copy(ids.begin() + first, ids.begin() + end, out);
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
  applier_.copy_rows(
      slice.key, ids, tensor_of(blob_of(rows), sizes, dtype, buffers_));
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
                       : index_of(slice, spec, value).size());
  } else if (has_form(payload, RowForm::kIds)) {
    const int64_t begin = begin_in(payload);
    const int64_t count = number_in(payload);
    if (begin < 0 || count < 0 || count > kMostIds) {
      return nullptr;
    }
    result = ids_in_range(slice, spec, value, begin, count);
  } else if (const auto ids = asked_ids(payload, spec.sizes[0])) {
    result = rows_with(slice, spec, value, *ids);
  } else {
    return nullptr;
  }
  auto answer = std::make_shared<Value>();
  answer->pieces = cut(blob_of(result), config_.piece_bytes);
  return answer;
}

} // namespace torchkv::dist

#include "row_query.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "row_payload.h"
#include "slice_shape.h"

namespace torchkv::dist {

std::optional<at::Tensor> asked_ids(const Blob& payload, int64_t num_cells) {
  if (!has_form(payload, RowForm::kRows)) {
    return std::nullopt;
  }
  at::Tensor ids;
  try {
    ids = ids_in(payload, num_cells, /*cell_bytes=*/0);
  } catch (const c10::ValueError&) {
    return std::nullopt;
  }
  const auto* const begin = ids.const_data_ptr<int64_t>();
  const auto* const end = begin + ids.numel();
  if (std::adjacent_find(begin, end) != end) {
    return std::nullopt;
  }
  return ids;
}

void copy_range(
    const Blobs& pieces,
    size_t piece_bytes,
    size_t begin,
    size_t size,
    std::byte* out) {
  size_t index = begin / piece_bytes;
  begin %= piece_bytes;
  while (size > 0) {
    const Blob& piece = pieces[index++];
    const size_t count = std::min(size, piece.size() - begin);
    std::memcpy(out, piece.data() + begin, count);
    out += count;
    size -= count;
    begin = 0;
  }
}

std::vector<Request::Query> make_queries(
    const at::Tensor& ids,
    const KeySpec& spec,
    c10::ArrayRef<Place> places,
    const Buffers& buffers) {
  const auto cell_bytes =
      static_cast<size_t>(cell_size(spec, places) * spec.item_bytes);
  std::vector<Request::Query> queries;
  for (auto& payload : pack_ids(RowForm::kRows, ids, spec, places, buffers)) {
    const auto count = static_cast<size_t>(number_in(payload));
    queries.push_back({std::move(payload), count * cell_bytes});
  }
  return queries;
}

ValuePtr select_rows(
    const SliceId& slice,
    const KeySpec& spec,
    const Value& value,
    const Blobs& query,
    const Config& config,
    const Buffers& buffers) {
  size_t num_bytes = 0;
  for (const Blob& piece : value.pieces) {
    num_bytes += piece.size();
  }
  const SliceShape shape(
      slice.key,
      spec,
      static_cast<int64_t>(num_bytes) / spec.item_bytes,
      config);
  const auto ids = asked_ids(
      query.size() == 1 ? query[0] : blob_of(joined_codes(query, buffers)),
      shape.num_cells);
  if (!ids) {
    return nullptr;
  }
  const auto cell_bytes =
      static_cast<size_t>(shape.cell_size * spec.item_bytes);
  const int64_t count = ids->numel();
  const at::Tensor rows =
      buffers.empty_codes(count * static_cast<int64_t>(cell_bytes));
  auto* out = static_cast<std::byte*>(rows.mutable_data_ptr());
  const auto* const id = ids->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count && cell_bytes != 0; ++i, out += cell_bytes) {
    copy_range(
        value.pieces,
        config.piece_bytes,
        static_cast<size_t>(id[i]) * cell_bytes,
        cell_bytes,
        out);
  }
  auto answer = std::make_shared<Value>();
  answer->pieces = cut(blob_of(rows), config.piece_bytes);
  return answer;
}

} // namespace torchkv::dist

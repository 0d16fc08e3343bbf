// What an applier does for row-sparse keys, whose rows are in its store.
#include <memory>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../core/row_sparse.h"
#include "../store/check.h"
#include "applier.h"
#include "encoded_pushes.h"
#include "errors.h"
#include "row_payload.h"

namespace torchkv::dist {

// With the rows that init, or a snapshot, has brought.
void Applier::insert_rows(const Begun& slice) {
  const Key& key = slice.slice.key;
  const KeySpec& spec = *slice.spec;
  const Where where{"init", key};
  const Meta meta = row_sparse_meta(
      where,
      spec.sizes[0],
      c10::IntArrayRef(spec.sizes).slice(1),
      static_cast<c10::ScalarType>(spec.dtype));
  check_row_init(where, meta, *spec.row_init);
  const Blobs& pieces = slice.source->pieces;
  const Blob payload =
      pieces.size() == 1 ? pieces[0] : blob_of(joined_codes(pieces, Buffers()));
  TORCHKV_CHECK_VALUE(
      has_form(payload, RowForm::kRows),
      where,
      "expected the rows that the key begins with, but got other bytes");
  auto encoding = std::make_shared<RowSparse>();
  encoding->ids =
      ids_in(payload, spec.sizes[0], row_bytes(spec), IdOrder::kDistinct);
  encoding->sizes = meta.sizes;
  encoding->dtype = meta.dtype;
  c10::SmallVector<int64_t, 4> sizes(meta.sizes);
  sizes[0] = encoding->ids.numel();
  const at::Tensor rows =
      cells_in(payload, sizes[0], row_size(spec), meta.dtype, Buffers());
  store_.init_rows(key, meta, *spec.row_init);
  if (sizes[0] == 0) {
    return;
  }
  try {
    const Tensors value =
        Tensors::encoded(rows.view(sizes), std::move(encoding));
    store_.assign({"init", key, &value});
  } catch (...) {
    store_.erase(key);
    throw;
  }
}

std::optional<std::string> Applier::forget_rows(
    Round& round,
    const Updates::Update& update) {
  keep_state(round);
  prepare(begun(round), update);
  const auto error = error_of([&] {
    for (const auto& ids : forgotten_ids(round, SliceShape(round, config_))) {
      store_.erase_rows("delete", round.slice.key, ids);
    }
  });
  round.result = result_of(round);
  return error;
}

// A copy, in the order in which they are stored.
Blobs Applier::stored_rows(const SliceId& slice, int64_t kid) {
  const auto held = held_.find(slice.key);
  TORCH_CHECK(
      held != held_.end() && held->second.kid == kid,
      "expected a row-sparse key that stays until it is saved, but it was "
      "deleted ",
      slice.key.context());
  const auto [ids, values] = store_.rows_by_slot(slice.key);
  RowSparse rows;
  rows.ids = ids;
  KeySpec spec;
  spec.sizes.assign(values.sizes().begin(), values.sizes().end());
  spec.row_init = RowInit();
  const std::vector<Place> places(1);
  return cut(
      pack_rows(rows, values, spec, places, Buffers())[0], config_.piece_bytes);
}

} // namespace torchkv::dist

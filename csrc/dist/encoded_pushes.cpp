#include "encoded_pushes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "../core/compressed.h"
#include "../core/plain_dispatch.h"
#include "../kernels/cpu/packed_codes.h"
#include "row_payload.h"

namespace torchkv::dist {
namespace {

kernels::cpu::PackedCodes codes_in(const Blob& bytes, int64_t num_elements) {
  return {
      reinterpret_cast<const char*>(bytes.data()),
      static_cast<int64_t>(bytes.size()),
      num_elements};
}

c10::ScalarType dtype_of(const Push& push) {
  return static_cast<c10::ScalarType>(push.dtype);
}

int64_t item_bytes_of(const Push& push) {
  return static_cast<int64_t>(c10::elementSize(dtype_of(push)));
}

bool is_forgetting(const Push& push) {
  return has_form(push.pieces[0], RowForm::kForgotten);
}

// Checked again at each use: another process may write to the payload.
at::Tensor ids_of(const Push& push, const SliceShape& shape) {
  TORCH_CHECK_VALUE(
      !shape.sizes.empty(), "expected a value without rows, but got rows");
  return ids_in(
      push.pieces[0], shape.num_cells, shape.cell_size * item_bytes_of(push));
}

void append_codes(
    const Push& push,
    const SliceShape& shape,
    int64_t num_elements,
    Tensors& values) {
  const Blob& bytes = push.pieces[0];
  auto encoding = std::make_shared<Packed>();
  encoding->sizes = shape.sizes;
  encoding->dtype = codes_in(bytes, num_elements).dtype();
  const auto size = static_cast<int64_t>(bytes.size());
  values.append(
      tensor_of(push.pieces, size, c10::kByte, Buffers()), std::move(encoding));
}

void append_rows(
    const Push& push,
    const SliceShape& shape,
    const Buffers& buffers,
    Tensors& values) {
  auto encoding = std::make_shared<RowSparse>();
  encoding->sizes = shape.sizes;
  encoding->dtype = dtype_of(push);
  encoding->ids = ids_of(push, shape);
  const auto* const ids = encoding->ids.const_data_ptr<int64_t>();
  const auto* const end = ids + encoding->ids.numel();
  encoding->is_distinct = std::adjacent_find(ids, end) == end;
  c10::SmallVector<int64_t, 4> sizes(shape.sizes);
  sizes[0] = encoding->ids.numel();
  const at::Tensor cells = cells_in(
      push.pieces[0],
      encoding->ids.numel(),
      shape.cell_size,
      encoding->dtype,
      buffers);
  const PlainDispatch plain;
  values.append(cells.view(sizes), std::move(encoding));
}

} // namespace

void join_encoded(
    Round& round,
    const SliceShape& shape,
    const Buffers& buffers) {
  for (auto& push : round.pushes) {
    if (!push.is_encoded) {
      check_size(push.pieces, shape.sizes, dtype_of(push));
      continue;
    }
    if (push.pieces.size() > 1) {
      push.pieces = {blob_of(joined_codes(push.pieces, buffers))};
    }
    if (has_form(push.pieces[0], RowForm::kRows)) {
      ids_of(push, shape);
      continue;
    }
    const bool is_row_sparse = round.spec->is_row_sparse();
    TORCH_CHECK_VALUE(
        !is_row_sparse || is_forgetting(push),
        "expected rows for a row-sparse key, but got codes");
    if (!is_row_sparse) {
      codes_in(push.pieces[0], round.num_elements);
    }
  }
}

bool forgets_rows(const Round& round) {
  const auto& pushes = round.pushes;
  if (!round.spec->is_row_sparse() ||
      std::none_of(pushes.begin(), pushes.end(), is_forgetting)) {
    return false;
  }
  TORCH_CHECK_VALUE(
      std::all_of(pushes.begin(), pushes.end(), is_forgetting),
      "expected that all ranks delete rows at the same place of the program, "
      "but some have pushed the key instead");
  return true;
}

std::vector<at::Tensor> forgotten_ids(
    const Round& round,
    const SliceShape& shape) {
  std::vector<at::Tensor> result;
  result.reserve(round.pushes.size());
  for (const auto& push : round.pushes) {
    result.push_back(ids_in(push.pieces[0], shape.num_cells, /*cell_bytes=*/0));
  }
  return result;
}

void append_push(
    const Push& push,
    const SliceShape& shape,
    int64_t num_elements,
    const Buffers& buffers,
    Tensors& values) {
  if (!push.is_encoded) {
    values.append(tensor_of(push.pieces, shape.sizes, dtype_of(push), buffers));
  } else if (has_form(push.pieces[0], RowForm::kRows)) {
    append_rows(push, shape, buffers, values);
  } else {
    append_codes(push, shape, num_elements, values);
  }
}

} // namespace torchkv::dist

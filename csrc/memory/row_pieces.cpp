#include "row_pieces.h"

#include <ATen/ops/as_strided.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

#include "../core/plain_dispatch.h"

namespace torchkv {

c10::SmallVector<RowPiece, 3> row_pieces(
    int64_t begin,
    int64_t end,
    int64_t row_size) {
  c10::SmallVector<RowPiece, 3> pieces;
  for (int64_t next = begin; next < end;) {
    RowPiece& piece = pieces.emplace_back();
    piece.first_row = next / row_size;
    piece.first_column = next % row_size;
    piece.begin = next - begin;
    const int64_t num_whole =
        piece.first_column == 0 ? (end - next) / row_size : 0;
    piece.num_rows = std::max(num_whole, int64_t{1});
    piece.num_columns = num_whole != 0
        ? row_size
        : std::min(row_size - piece.first_column, end - next);
    next += piece.num_rows * piece.num_columns;
  }
  return pieces;
}

at::Tensor piece_of(const at::Tensor& tensor, const RowPiece& piece) {
  const PlainDispatch plain;
  return at::as_strided(
      tensor,
      {piece.num_rows, piece.num_columns},
      {piece.num_columns, 1},
      tensor.storage_offset() + piece.begin);
}

at::Tensor as_movable(const at::Tensor& tensor) {
  const PlainDispatch plain;
  switch (tensor.scalar_type()) {
    case c10::kUInt16:
      return tensor.view(c10::kShort);
    case c10::kUInt32:
      return tensor.view(c10::kInt);
    case c10::kUInt64:
      return tensor.view(c10::kLong);
    default:
      return c10::isFloat8Type(tensor.scalar_type()) ? tensor.view(c10::kByte)
                                                     : tensor;
  }
}

} // namespace torchkv

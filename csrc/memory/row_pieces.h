#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "../core/export.h"

namespace torchkv {

// Rows of a value that some consecutive elements have whole, or one row of
// which they have some columns.
struct RowPiece {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_column = 0;
  int64_t num_columns = 0;
  int64_t begin = 0; // the first of its elements, among the consecutive ones
};

// The elements [begin, end) of a value whose rows have `row_size` elements: up
// to three pieces, in order.
TORCHKV_API c10::SmallVector<RowPiece, 3> row_pieces(
    int64_t begin,
    int64_t end,
    int64_t row_size);

// The elements of a piece, of shape (num_rows, num_columns), as a view.
// REQUIRES: a dense tensor of the consecutive elements, in their order.
TORCHKV_API at::Tensor piece_of(
    const at::Tensor& tensor,
    const RowPiece& piece);

// A view of fp8 numbers and unsigned integers, for which operators that only
// move elements are missing, as signed integers; other tensors as they are.
TORCHKV_API at::Tensor as_movable(const at::Tensor& tensor);

} // namespace torchkv

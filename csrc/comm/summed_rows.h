#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "../core/row_sparse.h"
#include "../device/stream_order.h"
#include "../memory/row_pieces.h"

namespace torchkv {

// Parts of row-sparse values on accelerators, for DeviceRowSums. All functions
// REQUIRE PlainDispatch.

int64_t row_size_of(const RowSparse& rows);

// Which of a value's rows, in the order of their ids, are those of a piece.
struct RowRange {
  RowRange(const RowSparse& rows, const RowPiece& piece);

  int64_t begin = 0;
  c10::ArrayRef<int64_t> of; // the ids
  bool is_distinct = true;
};

// Its columns of a piece, in the order of the ids, of this dtype on this
// device; possibly the payload itself.
at::Tensor payload_of(
    Runtime& runtime,
    const Value& value,
    const RowRange& range,
    const RowPiece& piece,
    c10::Device device,
    c10::ScalarType dtype);

// total[at[i]] += rows[i], by PyTorch's operators; in order, unless rows of up
// to 32 elements repeat more than 32 times. `at` is ascending.
void add_rows(
    const at::Tensor& total,
    const std::vector<int64_t>& at,
    const at::Tensor& rows);

// Makes zeros -0, to which any number can be added.
at::Tensor neutral(const at::Tensor& zeros);

// The rows of a piece that row-sparse values have, and their sums.
struct SummedRows {
  at::Tensor ids; // among the piece's rows
  at::Tensor sums; // (ids, columns)
};

// Sums on `home`, which has been entered and ordered after the values, in
// `accumulation`: by a kernel, which always adds in the order of the values,
// or, on devices without kernels, by add_rows.
SummedRows sum_rows_of(
    StreamOrder& order,
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::ScalarType accumulation);

} // namespace torchkv

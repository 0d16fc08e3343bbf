#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "../core/row_sparse.h"
#include "../device/stream_order.h"
#include "../kernels/cuda/params.h"
#include "../memory/row_pieces.h"

namespace torchkv {

// Rows of row-sparse values that a kernel reads where they are. All functions
// REQUIRE PlainDispatch.

int64_t row_size_of(const RowSparse& rows);

// Which of a value's rows, in the order of their ids, are those of a piece.
// Brings the ids to the host (bring_ids).
struct RowRange {
  RowRange(const RowSparse& rows, const RowPiece& piece);

  int64_t begin = 0;
  c10::ArrayRef<int64_t> of; // the ids
  bool is_distinct = true;
};

// The rows of a piece that row-sparse values have.
struct MergedRows {
  MergedRows(c10::ArrayRef<Value> values, const RowPiece& piece);

  RowPiece piece;
  c10::SmallVector<RowRange, 4> ranges; // of each value
  std::vector<int64_t> ids; // ascending, distinct
};

// A value's columns of a piece, in the order of the ids, of this dtype on this
// device; possibly the payload itself.
at::Tensor payload_of(
    Runtime& runtime,
    const Value& value,
    const RowRange& range,
    const RowPiece& piece,
    c10::Device device,
    c10::ScalarType dtype);

// In memory of the device.
at::Tensor to_device(
    Runtime& runtime,
    c10::ArrayRef<int64_t> numbers,
    c10::Device device);

// Where these are among the ids, both ascending.
std::vector<int64_t> positions_of(
    c10::ArrayRef<int64_t> these,
    c10::ArrayRef<int64_t> ids);

// What a kernel reads: the rows to add up, in the order of the values.
struct RowSources {
  at::Tensor ids; // among the piece's rows
  kernels::cuda::RowSums call{}; // without `sums`
  // The call has addresses in these.
  at::Tensor numbers;
  std::vector<at::Tensor> copies;
};

// The dtype in which a kernel on `home` reads all values to add them up in
// `accumulation`, if there is one.
std::optional<c10::ScalarType> dtype_to_read(
    const Place& home,
    c10::ArrayRef<Value> values,
    c10::ScalarType accumulation);

// On `home`, which has been entered and ordered after the values; maybe of no
// row. Blocks the host until the device has the addresses, unless the values'
// ids have been merged there (memory/merged_ids.h). REQUIRES: a
// dtype_to_read(), at least one column.
RowSources row_sources_of(
    Runtime& runtime,
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::ScalarType dtype);

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "../device/stream_order.h"
#include "row_sources.h"

namespace torchkv {

// Sums of rows of row-sparse values on accelerators, for DeviceRowSums. All
// functions REQUIRE PlainDispatch.

// Adds the values' rows of a piece to a dense tensor of the consecutive
// elements, as sum_rows_of().
void add_rows_of(
    StreamOrder& order,
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    const at::Tensor& total);

// Makes zeros -0, to which any number can be added.
at::Tensor neutral(const at::Tensor& zeros);

struct SummedRows {
  at::Tensor ids; // among the piece's rows
  at::Tensor sums; // (ids, columns)
};

// Sums on `home`, which has been entered and ordered after the values, in
// `accumulation`: by a kernel, which always adds in the order of the values,
// or, on devices without kernels, by PyTorch's operators; in order, unless rows
// of up to 32 elements repeat more than 32 times in a value.
SummedRows sum_rows_of(
    StreamOrder& order,
    const Place& home,
    c10::ArrayRef<Value> values,
    const RowPiece& piece,
    c10::ScalarType accumulation);

} // namespace torchkv

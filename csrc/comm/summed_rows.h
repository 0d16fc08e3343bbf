#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "../device/stream_order.h"
#include "row_sources.h"

namespace torchkv {

// Sums of rows of row-sparse values on accelerators, for DeviceRowSums. All
// functions REQUIRE PlainDispatch.

// total[at[i]] += rows[i], by PyTorch's operators; in order, unless rows of up
// to 32 elements repeat more than 32 times. `at` is ascending.
void add_rows(
    Runtime& runtime,
    const at::Tensor& total,
    const std::vector<int64_t>& at,
    const at::Tensor& rows);

// Makes zeros -0, to which any number can be added.
at::Tensor neutral(const at::Tensor& zeros);

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

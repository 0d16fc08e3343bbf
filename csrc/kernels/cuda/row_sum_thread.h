#pragma once

#include <cstdint>

#include "params.h"
#include "types.h"

// Sums of rows: the code of one thread of one block, compiled for GPUs by
// row_sums.cu, and for the host by the tests.
namespace torchkv::kernels::cuda {

// Elements of a thread: a word of them, or one where rows are not aligned.
template <typename V>
constexpr int kRowPack = kWord / static_cast<int>(sizeof(V));

// The threads of all rows, each of `kSize` columns. REQUIRES: kSize divides
// num_columns.
template <int kSize>
TORCHKV_HOST_DEVICE inline int64_t num_row_packs(const RowSums& call) {
  return call.num_rows * (call.num_columns / kSize);
}

template <typename V, int kSize>
TORCHKV_HOST_DEVICE inline void row_sum_thread(
    const RowSums& call,
    uint32_t block,
    uint32_t thread) {
  using total_t = arithmetic_t<V>;
  const int64_t pack = int64_t{block} * kThreads + thread;
  if (pack >= num_row_packs<kSize>(call)) {
    return;
  }
  const int64_t packs_of_row = call.num_columns / kSize;
  const int64_t row = pack / packs_of_row;
  const int64_t column = (pack - row * packs_of_row) * kSize;
  const int64_t end = call.offsets[row + 1];
  int64_t source = call.offsets[row];
  Pack<total_t, kSize> total;
  TORCHKV_UNROLL
  for (int i = 0; i < kSize; ++i) {
    total.at[i] = nothing<total_t>();
  }
  // In groups, whose loads are in flight together.
  constexpr int kGroup = 4;
  TORCHKV_NO_UNROLL
  for (; source < end; source += kGroup) {
    Pack<V, kSize> values[kGroup];
    TORCHKV_UNROLL
    for (int k = 0; k < kGroup; ++k) {
      if (source + k < end) {
        values[k] = load_once<V, kSize>(
            static_cast<const V*>(call.sources[source + k]) + column);
      }
    }
    TORCHKV_UNROLL
    for (int k = 0; k < kGroup; ++k) {
      if (source + k < end) {
        TORCHKV_UNROLL
        for (int i = 0; i < kSize; ++i) {
          total.at[i] = add(total.at[i], widen(values[k].at[i]));
        }
      }
    }
  }
  store(
      total,
      static_cast<total_t*>(call.sums) + row * call.num_columns + column);
}

} // namespace torchkv::kernels::cuda

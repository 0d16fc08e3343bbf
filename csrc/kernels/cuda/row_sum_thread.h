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

template <int kSize>
inline uint32_t num_row_blocks(const RowSums& call) {
  return static_cast<uint32_t>(
      (num_row_packs<kSize>(call) + kThreads - 1) / kThreads);
}

// The elements of a thread.
struct RowPack {
  template <int kSize>
  TORCHKV_HOST_DEVICE static inline RowPack of(
      const RowSums& call,
      int64_t pack) {
    const int64_t packs_of_row = call.num_columns / kSize;
    const int64_t row = pack / packs_of_row;
    return {row, (pack - row * packs_of_row) * kSize};
  }

  int64_t row; // of the sums
  int64_t column;
};

template <typename T, int kSize>
TORCHKV_HOST_DEVICE inline void clear(Pack<T, kSize>& total) {
  TORCHKV_UNROLL
  for (int i = 0; i < kSize; ++i) {
    total.at[i] = nothing<T>();
  }
}

// Adds the rows to `total`.
template <typename V, int kSize>
TORCHKV_HOST_DEVICE inline void add_rows(
    const RowSums& call,
    const RowPack& pack,
    Pack<arithmetic_t<V>, kSize>& total) {
  const int64_t end = call.offsets[pack.row + 1];
  int64_t source = call.offsets[pack.row];
  // In groups, whose loads are in flight together.
  constexpr int kGroup = 4;
  TORCHKV_NO_UNROLL
  for (; source < end; source += kGroup) {
    Pack<V, kSize> values[kGroup];
    TORCHKV_UNROLL
    for (int k = 0; k < kGroup; ++k) {
      if (source + k < end) {
        values[k] = load<true, V, kSize>(
            static_cast<const V*>(call.sources[source + k]) + pack.column);
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
}

template <typename V, int kSize>
TORCHKV_HOST_DEVICE inline void row_sum_thread(
    const RowSums& call,
    uint32_t block,
    uint32_t thread) {
  const int64_t number = int64_t{block} * kThreads + thread;
  if (number >= num_row_packs<kSize>(call)) {
    return;
  }
  const auto pack = RowPack::of<kSize>(call, number);
  using number_t = arithmetic_t<V>;
  const bool adds = call.added_to != nullptr;
  const int64_t row = adds ? call.added_to[pack.row] : pack.row;
  number_t* const sum =
      static_cast<number_t*>(call.sums) + row * call.num_columns + pack.column;
  Pack<number_t, kSize> total;
  if (adds) {
    total = load<false, number_t, kSize>(sum);
  } else {
    clear(total);
  }
  add_rows<V, kSize>(call, pack, total);
  store<false>(total, sum); // read next
}

} // namespace torchkv::kernels::cuda

// The rows, whole or not, among consecutive elements of a value.
#include "memory/row_pieces.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace torchkv {
namespace {

TEST(RowPiecesTest, CoverAnyRangeOnce) {
  constexpr int64_t kRows = 4;
  for (const int64_t row_size : {1, 2, 5}) {
    const int64_t count = kRows * row_size;
    const at::Tensor value = at::arange(count).view({kRows, row_size});
    for (int64_t begin = 0; begin <= count; ++begin) {
      for (int64_t end = begin; end <= count; ++end) {
        const at::Tensor part = value.view(-1).slice(0, begin, end);
        at::Tensor seen = at::zeros_like(value);
        const auto pieces = row_pieces(begin, end, row_size);
        EXPECT_LE(pieces.size(), 3);
        for (const auto& piece : pieces) {
          const auto of_piece = [&](const at::Tensor& whole) {
            return whole.narrow(0, piece.first_row, piece.num_rows)
                .narrow(1, piece.first_column, piece.num_columns);
          };
          EXPECT_TRUE(at::equal(piece_of(part, piece), of_piece(value)));
          of_piece(seen).add_(1);
        }
        at::Tensor expected = at::zeros_like(value);
        expected.view(-1).slice(0, begin, end).add_(1);
        EXPECT_TRUE(at::equal(seen, expected)) << begin << ' ' << end;
      }
    }
  }
}

TEST(RowPiecesTest, MovableTensorsHaveTheSameBytes) {
  for (const auto dtype :
       {at::kFloat8_e5m2, at::kUInt16, at::kUInt64, at::kHalf}) {
    const at::Tensor tensor = at::ones({3, 2}, at::kFloat).to(dtype).t();
    const at::Tensor movable = as_movable(tensor);
    EXPECT_EQ(movable.data_ptr(), tensor.data_ptr());
    EXPECT_EQ(movable.sizes(), tensor.sizes());
    EXPECT_EQ(movable.element_size(), tensor.element_size());
  }
}

} // namespace
} // namespace torchkv

#include "gather_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <vector>

#include "../core/plain_dispatch.h"
#include "../device/stream_order.h"
#include "row_pieces.h"

namespace torchkv {
namespace {

// Rows of a piece, where the piece is.
struct GatheredRows {
  RowPiece piece;
  at::Tensor positions; // among the outs' rows; undefined: all of them
  at::Tensor rows;
};

// Which of the ids are rows of the piece, and their numbers there.
GatheredRows rows_to_gather(const at::Tensor& ids, const RowPiece& piece) {
  const auto* const begin = ids.const_data_ptr<int64_t>();
  std::vector<int64_t> positions;
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const int64_t row = begin[i] - piece.first_row;
    if (row >= 0 && row < piece.num_rows) {
      positions.push_back(i);
      rows.push_back(row);
    }
  }
  const auto copy_of = [&](const std::vector<int64_t>& numbers) {
    const at::Tensor tensor =
        at::empty({static_cast<int64_t>(numbers.size())}, ids.options());
    std::copy(
        numbers.begin(), numbers.end(), tensor.mutable_data_ptr<int64_t>());
    return tensor;
  };
  return {piece, copy_of(positions), copy_of(rows)};
}

void write_rows_to(
    Runtime& runtime,
    const at::Tensor& out,
    const GatheredRows& gathered) {
  at::Tensor rows = as_movable(out);
  if (!gathered.positions.defined()) {
    runtime.copy(rows, gathered.rows);
    return;
  }
  rows.view({out.size(0), -1})
      .narrow(1, gathered.piece.first_column, gathered.piece.num_columns)
      .index_copy_(
          0,
          gathered.positions.to(out.device()),
          runtime.moved(
              gathered.rows, out.device(), gathered.rows.scalar_type()));
}

} // namespace

void gather_rows(
    Entry& entry,
    Streams& streams,
    const at::Tensor& given,
    const at::Tensor& out) {
  if (out.numel() == 0) {
    return;
  }
  const PlainDispatch plain;
  const bool is_there =
      entry.slices.size() == 1 && entry.slices[0].home.device == given.device();
  const at::Tensor ids = is_there ? given : given.to(c10::kCPU);
  std::vector<GatheredRows> gathered;
  {
    StreamOrder order(streams);
    for (auto& slice : entry.slices) {
      slice.enter(order);
      // Also with the caller's stream of a logical place's device, which copies
      // from there.
      order.use(slice.home, slice.home.device);
      order.use(slice.home, out.device());
      order.sync();
      const at::Tensor value = as_movable(slice.value);
      const auto select = [&](const at::Tensor& from, const at::Tensor& rows) {
        return at::index_select(from, 0, rows.to(from.device()));
      };
      if (entry.slices.size() == 1) {
        gathered.push_back({{}, {}, select(value, ids)});
        break;
      }
      for (const auto& piece :
           row_pieces(slice.begin, slice.end, entry.meta.row_size())) {
        GatheredRows& found = gathered.emplace_back(rows_to_gather(ids, piece));
        found.rows = select(piece_of(value, piece), found.rows);
      }
    }
  }
  // On the caller's streams, which wait for those of the slices now.
  for (const auto& part : gathered) {
    const at::Tensor& rows = part.rows;
    if (!rows.is_cpu()) {
      streams.runtime.keep_until_done(
          rows, streams.runtime.current_stream(rows.device()));
    }
    write_rows_to(streams.runtime, out, part);
  }
}

} // namespace torchkv

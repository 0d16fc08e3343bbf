#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "../core/export.h"
#include "../core/row_sparse.h"
#include "buffers.h"
#include "protocol/slice.h"

namespace torchkv::dist {

// Rows of a key, as a rank pushes them to the server of a slice. A row is sent
// in cells (cell_size), of which the slice has whole ones. A payload has, in
// this order, little-endian:
//
// - A header of 16 bytes: the form (RowForm), and the number of ids (int64).
// - The ids of cells (int64), counted from where the slice begins, ascending,
//   perhaps with repeats; then zeros up to a multiple of 64 bytes.
// - One cell for each id, without gaps.
//
// What a rank sends of rows that are merged by id on the server, in the order
// of the ranks, has the bits of as many replicas on one machine. So repeats of
// an id are sent as they are, in the order in which they were pushed.
//
// A cell of a row-sparse key is a row, whose id is that of the key, of any
// slice. Init brings the rows that it begins with, and snapshots keep its rows,
// in this form, too: distinct ones, in the order in which the server has them.

// What a payload begins with. Packed codes begin with the number of a codec,
// which is none of these.
enum class RowForm : uint64_t {
  kForgotten = 0xFC, // ids of rows to forget, without cells
  kIds = 0xFD, // asks for ids of a row-sparse slice's rows (table_queries.h)
  kCount = 0xFE, // asks for how many rows it has
  kRows = 0xFF,
};

// The payloads of all slices. `rows` has a row for each id of `value`, in its
// order, and is contiguous in CPU memory. REQUIRES: at most as many ids as a
// dense key has rows.
TORCHKV_API std::vector<Blob> pack_rows(
    const RowSparse& value,
    const at::Tensor& rows,
    const KeySpec& spec,
    c10::ArrayRef<Place> places,
    const Buffers& buffers);

// The same without cells: which rows of the slices a pull asks for, or which
// are to be forgotten. `ids` are of int64 in CPU memory, ascending and
// distinct.
TORCHKV_API std::vector<Blob> pack_ids(
    RowForm form,
    const at::Tensor& ids,
    const KeySpec& spec,
    c10::ArrayRef<Place> places,
    const Buffers& buffers);
// Asks for how many rows there are; for the ids of `count` of them, from the
// one with the number `begin` on.
TORCHKV_API Blob pack_count_query(const Buffers& buffers);
TORCHKV_API Blob
pack_ids_query(int64_t begin, int64_t count, const Buffers& buffers);

// Whether a payload has this form.
TORCHKV_API bool has_form(const Blob& payload, RowForm form);
// How many ids there are, or are asked for. REQUIRES: one of the forms.
TORCHKV_API int64_t number_in(const Blob& payload);
// Of pack_ids_query; -1 if it is none.
TORCHKV_API int64_t begin_in(const Blob& payload);
// Bytes of a row of a row-sparse key. ValueError for a dtype of other elements.
int64_t row_bytes(const KeySpec& spec);
// Where ids and cells begin in a payload of so many.
constexpr int64_t kIdsBegin = 16;
constexpr int64_t cells_begin(int64_t num_ids) {
  constexpr int64_t kAlignment = 64;
  const int64_t end = kIdsBegin + 8 * num_ids;
  return (end + kAlignment - 1) / kAlignment * kAlignment;
}

// Its ids, copied, as another process may write to the payload. ValueError
// unless it has cells of a slice of so many, of `cell_bytes` each, with
// ascending ids or, of stored rows, distinct ones.
enum class IdOrder : uint8_t { kAscending, kDistinct };
TORCHKV_API at::Tensor ids_in(
    const Blob& payload,
    int64_t num_cells,
    int64_t cell_bytes,
    IdOrder order = IdOrder::kAscending);
// The cells of so many ids. REQUIRES: ids_in.
TORCHKV_API at::Tensor cells_in(
    const Blob& payload,
    int64_t count,
    int64_t cell_size,
    c10::ScalarType dtype,
    const Buffers& buffers);

} // namespace torchkv::dist

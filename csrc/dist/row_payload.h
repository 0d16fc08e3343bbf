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
// - A header of 16 bytes: what no packed codes begin with, and the number of
//   ids (int64).
// - The ids of cells (int64), counted from where the slice begins, ascending,
//   perhaps with repeats; then zeros up to a multiple of 64 bytes.
// - One cell for each id, without gaps.
//
// What a rank sends of rows that are merged by id on the server, in the order
// of the ranks, has the bits of as many replicas on one machine. So repeats of
// an id are sent as they are, in the order in which they were pushed.

// The payloads of all slices. `rows` has a row for each id of `value`, in its
// order, and is contiguous in CPU memory. REQUIRES: at most as many ids as the
// key has rows.
TORCHKV_API std::vector<Blob> pack_rows(
    const RowSparse& value,
    const at::Tensor& rows,
    const KeySpec& spec,
    c10::ArrayRef<Place> places,
    const Buffers& buffers);

// The same without cells: which rows of the slices a pull asks for. `ids` are
// of int64 in CPU memory, ascending and distinct.
TORCHKV_API std::vector<Blob> pack_ids(
    const at::Tensor& ids,
    const KeySpec& spec,
    c10::ArrayRef<Place> places,
    const Buffers& buffers);

// Whether an encoded payload has rows, and not packed codes.
TORCHKV_API bool has_rows(const Blob& payload);

// Its ids, copied, as another process may write to the payload. ValueError
// unless it has cells of a slice of so many, of `cell_bytes` each.
TORCHKV_API at::Tensor ids_in(
    const Blob& payload,
    int64_t num_cells,
    int64_t cell_bytes);
// The cells of so many ids. REQUIRES: ids_in.
TORCHKV_API at::Tensor cells_in(
    const Blob& payload,
    int64_t count,
    int64_t cell_size,
    c10::ScalarType dtype,
    const Buffers& buffers);

} // namespace torchkv::dist

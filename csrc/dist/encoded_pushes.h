#pragma once

#include <cstdint>

#include "../core/export.h"
#include "../store/arguments.h"
#include "buffers.h"
#include "protocol/config.h"
#include "protocol/round.h"

namespace torchkv::dist {

// How a server's store has a slice: a whole key with its shape; a part of one
// as cells (cell_size), each a row.
struct TORCHKV_API SliceShape {
  SliceShape(const Round& round, const Config& config);

  c10::SmallVector<int64_t, 4> sizes;
  int64_t cell_size = 1;
  int64_t num_cells = 1;
};

// Makes the payload of each of a round's pushes that is encoded, as packed
// codes (kernels/cpu/packed_codes.h) or rows (row_payload.h), one piece.
// ValueError if a payload is not that of the slice's elements.
TORCHKV_API void join_encoded(
    Round& round,
    const SliceShape& shape,
    const Buffers& buffers);

// Appends a push as a value. REQUIRES: join_encoded.
TORCHKV_API void append_push(
    const Push& push,
    const SliceShape& shape,
    int64_t num_elements,
    const Buffers& buffers,
    Tensors& values);

} // namespace torchkv::dist

#pragma once

#include <cstdint>

#include "../core/export.h"
#include "../store/arguments.h"
#include "buffers.h"
#include "protocol/round.h"
#include "slice_shape.h"

namespace torchkv::dist {

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

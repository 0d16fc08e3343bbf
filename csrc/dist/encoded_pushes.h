#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "../core/export.h"
#include "../store/arguments.h"
#include "buffers.h"
#include "protocol/round.h"
#include "slice_shape.h"

namespace torchkv::dist {

// Makes the payload of each of a round's pushes that is encoded, as packed
// codes (kernels/cpu/packed_codes.h) or rows (row_payload.h), one piece.
// ValueError if a payload, encoded or not, is not that of the slice's elements.
TORCHKV_API void join_encoded(
    Round& round,
    const SliceShape& shape,
    const Buffers& buffers);

// Whether a round forgets rows of a row-sparse key: then all its pushes have
// ids of them. ValueError if only some do. REQUIRES: join_encoded.
bool forgets_rows(const Round& round);
// Which ones.
std::vector<at::Tensor> forgotten_ids(
    const Round& round,
    const SliceShape& shape);

// Appends a push as a value. REQUIRES: join_encoded.
TORCHKV_API void append_push(
    const Push& push,
    const SliceShape& shape,
    int64_t num_elements,
    const Buffers& buffers,
    Tensors& values);

} // namespace torchkv::dist

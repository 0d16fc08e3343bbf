#pragma once

#include "../core/export.h"
#include "../store/arguments.h"
#include "buffers.h"
#include "protocol/round.h"

namespace torchkv::dist {

// Makes the packed codes of a round's pushes (kernels/cpu/packed_codes.h) one
// piece each. ValueError if they are not those of the round's elements.
TORCHKV_API void join_codes(Round& round, const Buffers& buffers);
// The same; false instead of an error.
TORCHKV_API bool can_join_codes(Round& round, const Buffers& buffers);

// Appends such codes as a value of this shape. REQUIRES: join_codes.
TORCHKV_API void append_codes(
    const Push& push,
    int64_t num_elements,
    c10::IntArrayRef sizes,
    Tensors& values);

} // namespace torchkv::dist

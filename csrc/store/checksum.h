#pragma once

#include <cstdint>

#include "../core/export.h"
#include "state.h"

namespace torchkv {

// The CRC-32 of all that a state holds: names, keys, numbers, and the elements
// of its tensors in row-major order, wherever they are. Blocks until tensors on
// accelerators are copied. Any thread; REQUIRES: the GIL is released.
TORCHKV_API int64_t checksum_of(const StoreState& state);

} // namespace torchkv

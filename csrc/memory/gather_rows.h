#pragma once

#include <ATen/core/Tensor.h>

#include "../core/export.h"
#include "../device/streams.h"
#include "entry.h"

namespace torchkv {

// Copies rows of a dense value into `out`, one for each id: contiguous, of the
// stored dtype, on any device, ordered with its current stream. Reads only
// these rows. The ids are int64, on any device, ordered with its current
// stream; the host waits for them unless they are in CPU memory, or the whole
// value is where they are. REQUIRES: the entry's mutex, no other StreamOrder
// that has entered it, ids that the value has, and one slice or a contiguous
// value.
TORCHKV_API void gather_rows(
    Entry& entry,
    Streams& streams,
    const at::Tensor& ids,
    const at::Tensor& out);

} // namespace torchkv

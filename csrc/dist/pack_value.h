#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "../core/export.h"
#include "../memory/entry.h"
#include "../store/compression.h"
#include "buffers.h"
#include "protocol/slice.h"

namespace torchkv::dist {

// What a rank's compression sends of a key's value, in CPU memory and
// contiguous: the packed codes of each of its slices. What is not sent is kept
// in the entry, as its first residual. Of int4, the random numbers are those of
// position `rank` in a list of replicas. REQUIRES: a compression that has a
// codec for the key; a floating-point key; not the entry's mutex.
TORCHKV_API std::vector<Blob> pack_value(
    const StoreCompression& compression,
    Entry& entry,
    int64_t rank,
    const at::Tensor& value,
    c10::ArrayRef<Place> places,
    const Buffers& buffers);

} // namespace torchkv::dist

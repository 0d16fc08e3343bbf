#pragma once

#include "../core/export.h"
#include "../memory/entry.h"
#include "arguments.h"

namespace torchkv {

// Whether the outs of a call with values may be written while its values are
// still read, and whether they are so large that this saves time: no key
// repeats or is row-sparse, and no out overlaps another tensor of the call, but
// for values of its own key that have its very memory. REQUIRES: contiguous
// dense tensors in CPU memory.
TORCHKV_API bool can_write_with_sums(const Call& call, const Entries& entries);

} // namespace torchkv

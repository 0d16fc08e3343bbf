#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "item.h"

namespace torchkv {

// Whether two outs may share memory, by the extents that they span. Then they
// are written one after another: the last one counts.
bool may_overlap(c10::ArrayRef<Item> items);

// To be called for the outs of a call, which have been written below autograd,
// which does not count versions: an autograd graph that saved one must still
// notice.
void bump_versions(c10::ArrayRef<Item> items);

} // namespace torchkv

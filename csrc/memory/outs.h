#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "item.h"

namespace torchkv {

// Whether the memory extents of two outs overlap. Outs are then written in
// order, and the last one wins.
bool may_overlap(c10::ArrayRef<Item> items);

// Bumps the version counters of a call's outs, which are written below
// autograd, so that an autograd graph that saved one reports the change.
void bump_versions(c10::ArrayRef<Item> items);

} // namespace torchkv

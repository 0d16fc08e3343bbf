#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "../item.h"

namespace torchkv {

// Whether two outs may share memory, by the extents that they span. Then they
// are written one after another: the last one counts.
bool may_overlap(c10::ArrayRef<Item> items);

// To be called for each out. It has been written below autograd, which does not
// count versions: an autograd graph that saved it must still notice.
void bump_version(const at::Tensor& out);

} // namespace torchkv

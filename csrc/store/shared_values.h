#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "../memory/entry.h"
#include "arguments.h"

namespace torchkv {

// Stored values that are tensors of the caller's: what a call must fulfil, so
// that an element is never read and written by different keys of a call.

// Before the values of a call become stored values: ValueError for a tensor
// with gaps, overlapping elements or lazy operations, for one that is not in
// CPU memory where `only_cpu`, and for memory that another shared value of
// `others` or of the call has. REQUIRES: checked as one value per key; the
// thread holds no entry's mutex.
void check_shareable(
    const Call& call,
    const std::vector<EntryPtr>& others,
    bool only_cpu);

// For a call of entries, some of which may be shared: ValueError for a shared
// value whose storage was shrunk, and for a tensor of the call that has
// elements of a shared value, but is not, where `takes_itself`, that tensor
// under its own key. REQUIRES: as above.
void check_shared(
    const Call& call,
    const Entries& entries,
    bool takes_itself = true);

// NotImplementedError for a call that asks to share, for stores that cannot.
void refuse_sharing(const Call& call);

// Of a key's outs, those that are not the stored value itself. REQUIRES: the
// entry's mutex, and check_shared.
c10::SmallVector<at::Tensor, 1> without_itself(
    const Entry& entry,
    c10::ArrayRef<at::Tensor> outs);

} // namespace torchkv

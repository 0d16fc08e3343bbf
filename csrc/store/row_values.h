#pragma once

#include <optional>

#include "../memory/entry.h"
#include "arguments.h"

namespace torchkv {

// The values of a call with its torch.sparse_coo tensors as row-sparse values
// (core/row_sparse.h), which point into these tensors where they can; nothing
// if it has none. Sparse tensors that a call cannot push throw, and so does a
// key that takes none: its stored value, or another value of the call for it,
// is not in CPU memory, or the stored value is not contiguous. All other checks
// are those of check_values.
std::optional<Tensors> with_rows(const Call& call, const Entries& entries);

} // namespace torchkv

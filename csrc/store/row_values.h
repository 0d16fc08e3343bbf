#pragma once

#include <optional>

#include "../core/errors.h"
#include "../core/row_sparse.h"
#include "../memory/entry.h"
#include "arguments.h"

namespace torchkv {

// The values of a call with its torch.sparse_coo tensors, and all tensors for
// row-sparse keys, as row-sparse values (core/row_sparse.h), which point into
// these tensors where they can; nothing if it has none. Sparse tensors that a
// call cannot push throw, and so does a stored value that is not contiguous.
// All other checks are those of check_values. Ids are merged on the stored
// value's device, those of all keys together (memory/merged_ids.h); where that
// is not possible, they are copied to the CPU, and so are rows for row-sparse
// keys. The host waits, so such a call cannot be captured
// (check_not_capturing).
std::optional<Tensors> with_rows(
    const Call& call,
    const Entries& entries,
    Runtime& runtime);

// What was merged on devices of the ids of such values: beside their tensors,
// work of the call reads these.
std::vector<at::Tensor> merged_tensors(const Tensors& values);

// ValueError unless a sparse tensor has one sparse dimension.
void check_rows(const Where& where, const at::Tensor& sparse);

// Whether a tensor has rows: torch.sparse_coo, and not a wrapper.
bool is_sparse_coo(const at::Tensor& tensor);

// The outs of a pull that are not sparse, and the keys that have some; nothing
// if none is sparse.
struct DenseOuts {
  Keys keys;
  Tensors outs;
};
std::optional<DenseOuts> dense_outs(const Call& pull);
// Bumps the version counter of an out that was written below autograd.
void note_written(const at::Tensor& out);

// A coalesced torch.sparse_coo tensor, which keeps both tensors. REQUIRES: ids
// in ascending order, without repeats.
at::Tensor make_sparse(
    const at::Tensor& ids,
    const at::Tensor& rows,
    c10::IntArrayRef sizes);
// The same of some rows of a value: of its shape or, of one with unlimited
// rows, with as many as the largest id needs.
at::Tensor sparse_of_rows(
    const at::Tensor& ids,
    const at::Tensor& rows,
    const Meta& meta);
// A contiguous value as such a tensor.
at::Tensor sparse_of_all_rows(const at::Tensor& value);

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../core/export.h"
#include "../core/key.h"
#include "../memory/entry.h"
#include "arguments.h"

namespace torchkv {

class Store;
struct Meta;

// Rows of one value to copy, after all checks.
struct RowPull {
  Key key;
  int64_t num_rows; // of the value
  // 1-D, int64, from 0 to num_rows - 1; in CPU memory, or on the accelerator
  // that row_device() was for the key, which may have moved since.
  at::Tensor ids;
  // One row for each id: contiguous, of the stored dtype.
  at::Tensor rows;
  at::Tensor out; // dense, to which `rows` is then written; may be undefined
};

// Writes rows of each key's value into its outs: into a dense one of shape
// (*ids.shape, *value.shape[1:]) the rows that the ids name, in their order;
// into a sparse (coordinate) one of the value's shape, with one sparse
// dimension, the distinct rows in ascending order, coalesced. A key has one
// tensor of ids for all its outs, or one for each. Without outs: one tensor of
// ids per key, and a new tensor for each on the device of the ids.
//
// Everything is checked before anything is written. TypeError for ids that are
// neither int32 nor int64, IndexError for one that is out of range, the first
// of its tensor, ValueError for values without dimensions, for outs of other
// shapes, and for numbers of ids that fit neither. The host waits once for each
// accelerator with whole values and their ids, for the least and greatest ones,
// and for a copy of each other tensor of ids on an accelerator.
std::vector<at::Tensor> pull_rows(
    Store& store,
    const char* op,
    const Keys& keys,
    const Tensors* outs,
    const Tensors& row_ids);

// ValueError or TypeError unless a sparse out can get rows of such a value.
TORCHKV_API void check_sparse_out(
    const Where& where,
    const Meta& meta,
    const at::Tensor& out);

// The outs of a pull that are sparse, with their entries. Errors as
// check_sparse_out; ValueError for values without dimensions.
using SparseOuts = std::vector<std::pair<EntryPtr, at::Tensor>>;
SparseOuts sparse_outs(const Call& call, const Entries& entries);

// Copies the rows of a whole value.
TORCHKV_API void copy_rows(const at::Tensor& whole, const RowPull& pull);

// ValueError unless a value of this shape and dtype still has the rows: another
// thread may have replaced the key since they were checked.
TORCHKV_API void check_still_fits(
    const char* op,
    const RowPull& pull,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype);

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "../core/export.h"
#include "../core/rule.h"
#include "entry.h"

namespace torchkv {

// The memory of a row-sparse value: one slice in CPU memory, whose tensors have
// the rows that the value has, by slot (RowTable). Their memory grows as a
// vector's does, and is moved where the system can instead of copied.
//
// All functions REQUIRE the entry's mutex, and an entry with `rows`.

// Makes a new entry row-sparse, without rows. REQUIRES: as
// kernels::cpu::init_rows.
TORCHKV_API void make_row_sparse(Entry& entry, const RowInit& init);

// The slots of rows, int64 as the ids, which are contiguous in CPU memory.
// Missing rows are added, with their initial value and, of the tensors that an
// optimizer has for the value, what `rule` begins with; null: zeros. An
// exception has changed nothing.
TORCHKV_API at::Tensor slots_of(
    Entry& entry,
    const at::Tensor& ids,
    const RuleSpec* rule);

// Forgets rows, with what an optimizer keeps for them; those that the value
// does not have are skipped.
TORCHKV_API void remove_rows(Entry& entry, const int64_t* ids, int64_t count);
// The same for all rows but those in these slots.
TORCHKV_API void keep_rows(Entry& entry, c10::ArrayRef<at::Tensor> slots);

// Copies of rows, also of those that the value does not have, into `out`: one
// for each id, contiguous, of the stored dtype, in CPU memory.
TORCHKV_API void copy_rows(
    const Entry& entry,
    const at::Tensor& ids,
    const at::Tensor& out);

// Writes the rows of a sparse tensor of the value's dtype and row shape, with
// one sparse dimension; adds those that are missing. REQUIRES: ids that the
// value may have.
TORCHKV_API void write_rows(Entry& entry, const at::Tensor& sparse);

// The rows that it has, in ascending order: their ids, and their values.
TORCHKV_API std::pair<at::Tensor, at::Tensor> rows_by_id(const Entry& entry);
// Their ids by slot.
TORCHKV_API at::Tensor row_ids(const Entry& entry);
// Slots as a tensor, in ascending order of the ids.
TORCHKV_API at::Tensor slots_by_id(const Entry& entry);

} // namespace torchkv

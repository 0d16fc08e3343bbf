#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "value.h"

namespace torchkv {

constexpr const char* kRowSparse = "row-sparse";

// The rows that row-sparse values of a key have together, as tensors of int64
// on their device.
struct MergedIds {
  at::Tensor ids; // ascending, distinct
  // The values' rows, counted over all values in their order, that ids[i] has:
  // order[offsets[i]] to order[offsets[i + 1] - 1], ascending.
  at::Tensor offsets;
  at::Tensor order;
};

// Some rows of a value, along its first dimension; the others are zero. The
// payload has these rows, plain and contiguous, for a row-sparse key in CPU
// memory.
//
// Of a value pushed to a row-sparse key, Batch::find_rows replaces the ids, in
// any order until then, by slots of the stored value.
struct RowSparse final : Encoding {
  RowSparse() {
    form = kRowSparse;
  }

  // Which row of the value each one is, int64, contiguous, as given: on the
  // device of the dense value that it is pushed to, if kernels can merge the
  // rows there. The host has them only after bring_ids (memory/row_ids.h).
  // Nothing keeps them after the call, so the call waits for all that reads
  // them.
  at::Tensor ids_on_device;
  // With those of the key's other values there; the value's rows begin at this
  // one.
  std::shared_ptr<const MergedIds> merged;
  int64_t first_merged = 0;

  // The same, contiguous in CPU memory, ascending, with repeats.
  mutable at::Tensor ids;
  // Where in the payload the row of each id is, as `ids`; rows of one id are in
  // the order pushed. Undefined where the payload has the order of the ids.
  mutable at::Tensor order;
  // That no id repeats: known where `order` is not set.
  mutable bool is_distinct = false;
};

// Null for other values.
inline const RowSparse* rows_in(const Value& value) {
  return dynamic_cast<const RowSparse*>(value.encoding);
}

inline bool has_rows_only(c10::ArrayRef<Value> values) {
  return std::all_of(values.begin(), values.end(), [](const Value& value) {
    return rows_in(value) != nullptr;
  });
}

} // namespace torchkv

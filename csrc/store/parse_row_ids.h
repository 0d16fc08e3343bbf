#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../core/errors.h"
#include "../core/export.h"
#include "../core/key.h"
#include "../memory/meta.h"

namespace torchkv {

// Row ids of a value as a list, int64 in CPU memory. TypeError for what is no
// dense tensor of int32 or int64, IndexError for the first id that is out of
// range.
TORCHKV_API at::Tensor parse_row_ids(
    const Where& where,
    const Meta& meta,
    const at::Tensor& given);

// Ascending. `ids` are of int64, contiguous, in CPU memory.
at::Tensor distinct_ids(const at::Tensor& ids);

// Row ids on accelerators, where they stay.
class UncheckedRowIds {
 public:
  // As a list, int64. With the TypeErrors of parse_row_ids.
  at::Tensor add(const Where& where, const Meta& meta, const at::Tensor& given);
  // With the IndexErrors of parse_row_ids. The host waits once for each device,
  // for the least and greatest ids.
  void check(const char* op);

 private:
  struct Added {
    Key key;
    Meta meta;
    at::Tensor given;
    at::Tensor ids;
  };
  std::vector<Added> added_; // in order, none of them empty
};

} // namespace torchkv

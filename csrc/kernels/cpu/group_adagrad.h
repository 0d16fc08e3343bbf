#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "lines.h"

namespace torchkv::kernels::cpu {

// The first of GroupAdaGrad's two passes over dense lines of whole rows: adds
// the mean of the squares of each row's gradient to its history, which each
// element of the row has. The second is that of SumLine.
class GroupHistories {
 public:
  // REQUIRES: the dtype of the arithmetic, which sums have; a step that
  // outlives this.
  GroupHistories(const RuleStep& step, c10::ScalarType dtype, int64_t row_size)
      : step_(step), dtype_(dtype), row_size_(row_size) {}

  // `sum` adds up the values; `value_size`: bytes of an element of one.
  void add(
      const SumLine& sum,
      c10::ArrayRef<const char*> values,
      int64_t value_size,
      char* history,
      int64_t num_elements) const;

 private:
  const RuleStep& step_;
  c10::ScalarType dtype_;
  int64_t row_size_; // elements
};

} // namespace torchkv::kernels::cpu

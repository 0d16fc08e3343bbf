#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

#include "../../core/export.h"
#include "../../core/rule.h"
#include "lines.h"

namespace torchkv::kernels::cpu {

// What one replica pushes: some rows, or a dense value.
struct RowSource {
  // The rows, one after another; of a dense value, the elements from the first
  // of RowSum::stored.
  const char* data = nullptr;
  bool is_dense = false;
  const int64_t* ids = nullptr; // of the rows, ascending
  const int64_t* order = nullptr; // of the rows in `data`; null: that of `ids`
  int64_t num_ids = 0;
  bool is_distinct = false; // that no id repeats; false if unknown
};

// stored = rule(stored, sources[0] + sources[1] + ...), for the rows that a
// source has; with a dense source, for all rows. ASSIGN sets rows that no
// source has to zero. Each row is summed as kernels::cpu::Sum says, rows of one
// id in the order of their source, so that rows which all sources have once get
// the bits of the sum of dense values.
//
// REQUIRES: at least one source, all of `dtype` and contiguous, in memory that
// overlaps with `stored` only where a dense source is `stored` itself; ids of
// rows of the value; `stored` is contiguous. Otherwise as Sum.
struct RowSum {
  c10::ArrayRef<RowSource> sources;
  c10::ScalarType dtype;
  int64_t row_size; // elements of a row, at least one
  int64_t begin; // of the value's elements, the first in `stored`
  const at::Tensor& stored;
  c10::ScalarType accumulation;
  const RuleStep& step = kAssignStep;
  StateLine state = {}; // from the first element of `stored`
};

// Sums of rows, executed together by run(), as SumBatch: one pass merges the
// rows by id, steps and writes, without a sum in memory.
// REQUIRES: a rule that can_step_rows(), and whole rows for one that
// is_row_wise() or the whole value for one that needs_gradient_norm(); except
// for norms.
class TORCHKV_API RowSumBatch {
 public:
  void add(const RowSum& sum);
  void run() const;

  // As SumBatch::squared_norm; rows that no source has count nothing.
  double squared_norm(double scale) const;

  struct Job;

 private:
  template <class Body>
  void for_each(Body body) const;
  std::vector<double> squared_norms(double scale) const; // of the jobs
  std::vector<RuleStep> elementwise_steps() const;

  std::vector<Job> jobs_;
};

struct RowSumBatch::Job {
  c10::SmallVector<RowSource, 4> sources; // without rows outside of `stored`
  c10::ScalarType source_dtype = c10::kFloat;
  int64_t source_size = 0; // bytes of an element
  int64_t row_size = 0;
  int64_t begin = 0; // elements of the value
  int64_t end = 0;
  char* stored = nullptr;
  c10::ScalarType dtype = c10::kFloat;
  int64_t stored_size = 0;
  c10::ScalarType accumulation = c10::kFloat;
  const RuleStep* step = nullptr;
  StateLine state;
  int64_t bytes_of_state = 0; // of an element
  bool has_all_rows =
      false; // that they are written, by ASSIGN or a dense source
  // Rows at which the work may be divided, from the first row to past the last:
  // a function of the ids, so that norms do not depend on threads.
  std::vector<int64_t> cuts;
  int64_t bytes_per_piece = 0; // between two cuts, on average
};

} // namespace torchkv::kernels::cpu

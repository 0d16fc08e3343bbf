#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

#include "../../core/export.h"
#include "../../core/rule.h"
#include "../../core/value.h"
#include "copy_batch.h"
#include "lines.h"
#include "norms.h"

namespace torchkv::kernels::cpu {

// stored = rule(stored, values[0] + values[1] + ...). Values are added left to
// right in `accumulation` and rounded once to the dtype of `stored`; a rule
// computes in fp32 or, for fp64 and complex128, in fp64.
//
// REQUIRES: at least one value; all on the CPU, of the shape of `stored`,
// without conj, neg or zero bits; conversion from `accumulation` is allowed;
// floating-point or complex tensors for a rule other than ASSIGN, whose state
// is dense, with the strides of `stored`. Tensors and the step outlive the
// batch's run().
struct Sum {
  c10::ArrayRef<Value> values;
  const at::Tensor& stored;
  c10::ScalarType accumulation;
  const RuleStep& step = kAssignStep;
  StateLine state = {}; // from the first element
  // Get the new value, too. SumBatch writes them while it is in the caches.
  c10::ArrayRef<at::Tensor> outs = {};

  int64_t bytes_of_state() const; // of an element
};

// The sums of a call, executed together by run() in one pass over the memory,
// which blocks until done. Any thread; versions of the stored values are not
// bumped.
class TORCHKV_API SumBatch {
 public:
  // REQUIRES: the values have the memory layout of `stored`, which is
  // non-overlapping and dense. Dtypes may differ. Outs, which only an
  // elementwise rule may have, have both; none overlaps another tensor of the
  // batch, but a value of the sum may have the very memory of one.
  void add(const Sum& sum);
  void run() const;

  // The squared 2-norm of all gradients as the rules see them, each number
  // multiplied by `scale` in fp64. The same bits for any number of threads.
  double squared_norm(double scale) const;

 private:
  struct Job {
    size_t values_end = 0; // in values_ and dtypes_
    size_t outs_end = 0; // in outs_
    int64_t num_elements = 0;
    int64_t bytes_per_element = 0;
    char* stored = nullptr;
    c10::ScalarType dtype = c10::kFloat;
    c10::ScalarType accumulation = c10::kFloat;
    const RuleStep* step = nullptr;
    StateLine state;
    int64_t bytes_of_state = 0;
  };

  SumLine line_of(size_t job, const RuleStep& step) const;
  c10::SmallVector<const char*, 8> values_of(size_t job, int64_t begin) const;
  void run_with_outs(
      size_t job,
      const RuleStep& step,
      int64_t begin,
      int64_t end,
      bool stream) const;
  StateLine state_of(size_t job, int64_t begin) const;
  template <class Includes, class Squares>
  std::vector<Norms> norms_of(Includes includes, Squares squares) const;
  std::vector<RuleStep> elementwise_steps() const;
  void run_lamb() const;

  c10::SmallVector<const char*, 4> values_;
  c10::SmallVector<c10::ScalarType, 4> dtypes_;
  c10::SmallVector<char*, 1> outs_;
  c10::SmallVector<Job, 1> jobs_;
};

// Sums of values of any strides, executed one after another. Values with
// another order of dimensions than `stored` are copied first, in blocks of at
// most 16 MiB or 16 columns; slices and expanded values are not, which would
// take 2 to 15 times as long.
// REQUIRES: not LAMB, which needs sums of the memory layout of `stored`.
class TORCHKV_API StridedSums {
 public:
  // REQUIRES: no outs.
  void add(const Sum& sum);
  // Of the copies of a block: the most that a sum needs.
  int64_t scratch_bytes() const {
    return scratch_bytes_;
  }
  // REQUIRES: so many bytes, aligned to 64; undefined if none.
  void run(const at::Tensor& scratch) const;

 private:
  struct Job {
    Sum sum; // without its values
    c10::SmallVector<Value, 4> values;
    c10::SmallVector<bool, 4> is_transposed; // of the values
    int64_t block = 0; // size along `dim`
    int64_t dim = -1; // of the blocks; -1: no value is transposed
  };
  static void run(const Job& job, char* scratch);

  std::vector<Job> jobs_;
  int64_t scratch_bytes_ = 0;
};

} // namespace torchkv::kernels::cpu

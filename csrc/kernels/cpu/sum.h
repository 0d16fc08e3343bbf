#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "../../export.h"
#include "../../rule.h"
#include "../../value.h"

namespace torchkv::kernels::cpu {

// The sums of a call: stored = rule(stored, values[0] + values[1] + ...) for
// each that is added, carried out together by run(), in one pass over the
// memory. Added left to right in `accumulation`, rounded once to the dtype of
// `stored`.
//
// REQUIRES: at least one value; all on the CPU, of the shape of `stored`,
// without conj, neg or zero bits; conversion from `accumulation` is allowed;
// floating-point or complex tensors for a rule that is not ASSIGN. Tensors and
// rule outlive run(), which blocks until done. Any thread; versions of `stored`
// are not counted.
class TORCHKV_API SumBatch {
 public:
  explicit SumBatch(const RuleSpec& rule) : rule_(rule) {}

  // REQUIRES: the values lie in memory as `stored` does, which is
  // non-overlapping and dense (lie_alike). Dtypes may differ.
  void add(
      c10::ArrayRef<Value> values,
      const at::Tensor& stored,
      c10::ScalarType accumulation);
  void run() const;

 private:
  struct Job {
    size_t values_end = 0; // in values_ and dtypes_
    int64_t num_elements = 0;
    int64_t bytes_per_element = 0;
    char* stored = nullptr;
    c10::ScalarType dtype = c10::kFloat;
    c10::ScalarType accumulation = c10::kFloat;
  };

  const RuleSpec& rule_;
  c10::SmallVector<const char*, 4> values_;
  c10::SmallVector<c10::ScalarType, 4> dtypes_;
  c10::SmallVector<Job, 1> jobs_;
};

// The same for one stored value and any strides, without a temporary copy.
TORCHKV_API void sum_strided(
    c10::ArrayRef<Value> values,
    const at::Tensor& stored,
    c10::ScalarType accumulation,
    const RuleSpec& rule);

// The copies of a call: each source into all its outs, carried out together by
// run(), each source read once.
//
// REQUIRES: one dtype per source and its outs, all on the CPU, without conj,
// neg or zero bits, alike in memory, non-overlapping and dense. No out overlaps
// another tensor of the batch, except that it may be its source. Otherwise as
// SumBatch.
class TORCHKV_API CopyBatch {
 public:
  void add(const at::Tensor& source, const at::Tensor& out);
  void run() const;

 private:
  struct Job {
    const char* source = nullptr;
    int64_t num_bytes = 0;
    size_t outs_end = 0; // in outs_
  };

  c10::SmallVector<char*, 4> outs_;
  c10::SmallVector<Job, 1> jobs_;
};

// Whether element i of one tensor, counted as they lie in memory, is element i
// of the other.
TORCHKV_API bool lie_alike(const at::Tensor& a, const at::Tensor& b);

} // namespace torchkv::kernels::cpu

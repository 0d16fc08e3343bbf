#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>

#include "../../core/export.h"
#include "../../core/rule.h"
#include "../../core/value.h"
#include "lines.h"

namespace torchkv::kernels::cpu {

// Where a stored value's state lies, for an optimizer: undefined tensors where
// there is none. All are dense and have the strides of the stored value.
struct State {
  at::Tensor master; // the value itself, where its dtype rounds it
  std::array<at::Tensor, kMaxStates> states;
};

// The sums of a call: stored = rule(stored, values[0] + values[1] + ...) for
// each that is added, carried out together by run(), in one pass over the
// memory. Added left to right in `accumulation`, rounded once to the dtype of
// `stored`; a rule works in fp32 or, for fp64 and complex128, in fp64.
//
// REQUIRES: at least one value; all on the CPU, of the shape of `stored`,
// without conj, neg or zero bits; conversion from `accumulation` is allowed;
// floating-point or complex tensors for a rule that is not ASSIGN. Tensors and
// steps outlive run(), which blocks until done. Any thread; versions of
// `stored` are not counted.
class TORCHKV_API SumBatch {
 public:
  // REQUIRES: the values lie in memory as `stored` does, which is
  // non-overlapping and dense (lie_alike). Dtypes may differ.
  void add(
      c10::ArrayRef<Value> values,
      const at::Tensor& stored,
      c10::ScalarType accumulation,
      const RuleStep& step = kAssignStep,
      const State& state = {});
  void run() const;

  // The squared 2-norm of all gradients, as the rules would see them, each
  // multiplied by `scale` in fp64. The same bits for any number of threads.
  double squared_norm(double scale) const;

 private:
  struct Job {
    size_t values_end = 0; // in values_ and dtypes_
    int64_t num_elements = 0;
    int64_t bytes_per_element = 0;
    char* stored = nullptr;
    c10::ScalarType dtype = c10::kFloat;
    c10::ScalarType accumulation = c10::kFloat;
    const RuleStep* step = nullptr;
    StateLine state;
  };

  SumLine line_of(size_t job) const;
  c10::SmallVector<const char*, 8> values_of(size_t job, int64_t begin) const;
  StateLine state_of(size_t job, int64_t begin) const;
  void run_lamb() const;

  c10::SmallVector<const char*, 4> values_;
  c10::SmallVector<c10::ScalarType, 4> dtypes_;
  c10::SmallVector<Job, 1> jobs_;
};

// The same for one stored value and any strides, without a temporary copy.
// REQUIRES: not LAMB, whose sums must lie as the stored value does.
TORCHKV_API void sum_strided(
    c10::ArrayRef<Value> values,
    const at::Tensor& stored,
    c10::ScalarType accumulation,
    const RuleStep& step = kAssignStep,
    const State& state = {});

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
// of the other: of tensors of such sizes and strides.
TORCHKV_API bool lie_alike(
    c10::IntArrayRef sizes,
    c10::IntArrayRef a_strides,
    c10::IntArrayRef b_strides);
// The same of two tensors of one shape.
inline bool lie_alike(const at::Tensor& a, const at::Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) ||
      lie_alike(a.sizes(), a.strides(), b.strides());
}

} // namespace torchkv::kernels::cpu

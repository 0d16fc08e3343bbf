#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <list>
#include <vector>

#include "../core/export.h"
#include "../device/runtime.h"
#include "../kernels/cpu/sum.h"
#include "backend.h"

namespace torchkv {

// The kernels of kernels/cpu: all that is in CPU memory, of any dtypes and
// strides.
class TORCHKV_API CpuBackend final : public Backend {
 public:
  explicit CpuBackend(Runtime& runtime) : runtime_(runtime) {}

  bool add(const Job& job) override;
  bool add_norm(const Job& job) override;
  bool add_copy(const Slice& source, const at::Tensor& out) override;
  void run() override;
  double squared_norm(double scale) override {
    return sums_.squared_norm(scale);
  }

  // The step or the norm of a finished sum, instead of the job's values; the
  // sum has the memory layout of the result.
  void add_sum(const Job& job, at::Tensor sum);
  void add_norm_of_sum(const Job& job, at::Tensor sum);

 private:
  struct Strided {
    Job job; // without its values
    c10::SmallVector<Value, 4> values;
  };

  at::Tensor strided_sum(const Job& job);
  void reserve_scratch(const Job& job);

  Runtime& runtime_;
  kernels::cpu::SumBatch sums_;
  kernels::cpu::CopyBatch copies_;
  std::vector<Strided> strided_;
  at::Tensor scratch_; // of strided sums, one after another
  std::list<at::Tensor> totals_; // an empty deque would allocate
};

} // namespace torchkv

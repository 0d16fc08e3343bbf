#pragma once

#include <ATen/core/Tensor.h>

#include "../core/export.h"
#include "../device/runtime.h"
#include "../kernels/cpu/row_sums.h"
#include "../kernels/cpu/sum.h"
#include "backend.h"

namespace torchkv {

// The kernels of kernels/cpu: all that is in CPU memory, of any dtypes and
// strides. Norms and rules that are not elementwise, of values with another
// memory layout than the result (or, for row-wise rules, of several dtypes),
// are left to AtenBackend, which adds up the values first.
class TORCHKV_API CpuBackend final : public Backend {
 public:
  explicit CpuBackend(Runtime& runtime) : runtime_(runtime) {}

  // Whether there is a kernel for the step of a contiguous value.
  static bool can_step(const Job& job);

  bool add(const Job& job) override;
  bool add_copy(const Slice& source, const at::Tensor& out) override;
  void run() override;
  double squared_norm(double scale) override {
    return sums_.squared_norm(scale);
  }

 private:
  bool add_rows(kernels::cpu::Sum& sum);
  void add_copies(kernels::cpu::Sum& sum);

  Runtime& runtime_;
  kernels::cpu::SumBatch sums_;
  kernels::cpu::RowSumBatch rows_; // of row-wise rules
  kernels::cpu::StridedSums strided_;
  at::Tensor scratch_; // of strided_, if needed
  kernels::cpu::CopyBatch copies_;
};

} // namespace torchkv

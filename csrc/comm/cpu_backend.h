#pragma once

#include <ATen/core/Tensor.h>

#include "../core/export.h"
#include "../device/runtime.h"
#include "../kernels/cpu/sum.h"
#include "backend.h"

namespace torchkv {

// The kernels of kernels/cpu: all that is in CPU memory, of any dtypes and
// strides. Norms and rules that are not elementwise, of values with another
// memory layout than the result, are left to AtenBackend, which adds up the
// values first.
class TORCHKV_API CpuBackend final : public Backend {
 public:
  explicit CpuBackend(Runtime& runtime) : runtime_(runtime) {}

  bool add(const Job& job) override;
  bool add_copy(const Slice& source, const at::Tensor& out) override;
  void run() override;
  double squared_norm(double scale) override {
    return sums_.squared_norm(scale);
  }

 private:
  Runtime& runtime_;
  kernels::cpu::SumBatch sums_;
  kernels::cpu::StridedSums strided_;
  at::Tensor scratch_; // of strided_, if needed
  kernels::cpu::CopyBatch copies_;
};

} // namespace torchkv

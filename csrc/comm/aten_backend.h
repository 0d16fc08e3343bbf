#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <list>
#include <vector>

#include "../device/stream_order.h"
#include "backend.h"
#include "cpu_backend.h"
#include "cuda_backend.h"

namespace torchkv {

// PyTorch's operators: any device, and everything that the kernels do not
// support. Where the kernels support the step of the sum, they make it. On an
// accelerator, a step that runs out of memory may be half done.
class AtenBackend final : public Backend {
 public:
  AtenBackend(CpuBackend& cpu, CudaBackend& cuda, StreamOrder& order)
      : cpu_(cpu), cuda_(cuda), runtime_(order.runtime()), order_(order) {}

  bool add(const Job& job) override;
  bool add_copy(const Slice& source, const at::Tensor& out) override;
  void run() override;
  double squared_norm(double scale) override;

 private:
  struct Queued {
    Job job; // without its values
    c10::SmallVector<Value, 4> values;
    at::Tensor sum; // of the values, if it is made already; overwritten
  };
  at::Tensor sum_of(const Job& job, c10::ArrayRef<Value> values);
  void sum_into(
      c10::ArrayRef<Value> values,
      const at::Tensor& result,
      c10::ScalarType accumulation);
  void step(const Job& job, const at::Tensor& gradient);

  CpuBackend& cpu_;
  CudaBackend& cuda_;
  Runtime& runtime_;
  StreamOrder& order_;
  std::vector<Queued> queued_;
  // For the kernels. An empty deque would allocate.
  std::list<at::Tensor> totals_;
};

} // namespace torchkv

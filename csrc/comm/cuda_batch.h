#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "../core/place.h"
#include "../core/rule.h"
#include "../core/value.h"
#include "../device/stream_order.h"
#include "../kernels/cuda/pack.h"
#include "../memory/entry.h"

namespace torchkv {

// A call's sums, norms and copies on CUDA devices: one launch for each device,
// or a few where dtypes differ. What lies elsewhere, in another layout or of
// another dtype is copied to the device first, which allocates. In a steady
// state nothing else does.
//
// Work is enqueued on the streams of `order`, which know what to wait for then.
// REQUIRES: `order` outlives it; the tensors' slices have been entered there.
class CudaBatch {
 public:
  CudaBatch(Runtime& runtime, StreamOrder& order)
      : runtime_(runtime), order_(order) {}

  // As kernels::cpu::SumBatch::add, for values of any device and layout, with
  // the master and the states of `state`. Where there is no kernel, it does
  // nothing and returns false. REQUIRES: `home`, the place of `stored`, is the
  // current one.
  bool add(
      c10::ArrayRef<Value> values,
      const at::Tensor& stored,
      const Place& home,
      c10::ScalarType accumulation,
      const RuleStep& step = kAssignStep,
      const Slice* state = nullptr);

  // Adds the squares of the values' sum, as squared_norm_with_aten, to what
  // squared_norm() returns; else as add(). REQUIRES: as add(); `step` outlives
  // squared_norm().
  bool add_norm(
      c10::ArrayRef<Value> values,
      const at::Tensor& stored,
      const Place& home,
      c10::ScalarType accumulation,
      const RuleStep& step);

  // Copies into an out of the same dtype that lies alike in memory, and returns
  // true; else it does nothing. REQUIRES: as add(); `source` outlives run().
  bool add_copy(
      const at::Tensor& source,
      const Place& home,
      const at::Tensor& out);

  // Launches what has been added. RuntimeError where CUDA has failed.
  void run();

  // The sum of all squares that have been added, of each number multiplied by
  // `scale` before it is squared. Waits for it.
  double squared_norm(double scale);

 private:
  // The values of a key as a kernel can add them up.
  struct Sum {
    kernels::cuda::SumJob job;
    c10::SmallVector<const void*, 8> addresses;
  };
  struct Home {
    Home(const Place& place_, StreamOrder& order);

    Place place;
    kernels::cuda::Launches launches;
    std::vector<Sum> norms; // not launched yet
  };
  Home& home_of(const Place& place);
  using Supports = bool (*)(const kernels::cuda::SumJob& job);
  bool prepare(
      Sum& sum,
      c10::ArrayRef<Value> values,
      const at::Tensor& stored,
      const Place& home,
      c10::ScalarType accumulation,
      const RuleStep& step,
      Supports supports);
  bool has_kernels(c10::Device device);
  bool is_plain(const at::Tensor& tensor, const at::Tensor& stored);
  const void* address_of(
      const at::Tensor& value,
      const at::Tensor& stored,
      const Place& home,
      c10::ScalarType dtype);
  void flush_copy();

  Runtime& runtime_;
  StreamOrder& order_;
  std::vector<std::unique_ptr<Home>> homes_;
  std::vector<at::Tensor> staged_; // until the launch
  c10::Device device_ = c10::kCPU; // the last that was found to have kernels
  const at::Tensor* source_ = nullptr; // of the copies to `outs_`
  Place source_home_;
  c10::SmallVector<void*, 8> outs_;
};

} // namespace torchkv

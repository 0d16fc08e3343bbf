#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "../kernels/cpu/sum.h"
#include "../kernels/cuda/pack.h"
#include "../place.h"
#include "../rule.h"
#include "../value.h"
#include "peer_access.h"
#include "stream_order.h"

namespace torchkv {

// A call's sums and copies on CUDA devices: one launch for each device, or a
// few where dtypes differ. What lies elsewhere, in another layout or of another
// dtype is copied to the device first, which allocates. In a steady state
// nothing else does.
//
// Work is enqueued on the streams of `order`. REQUIRES: `order` outlives it;
// the tensors' slices have been entered there.
class CudaBatch {
 public:
  CudaBatch(Runtime& runtime, StreamOrder& order, PeerAccess& peers)
      : runtime_(runtime), order_(order), peers_(peers) {}

  // As kernels::cpu::SumBatch::add, for values of any device and layout. Where
  // there is no kernel, it does nothing and returns false. REQUIRES: `home`,
  // the place of `stored`, is the current one.
  bool add(
      c10::ArrayRef<Value> values,
      const at::Tensor& stored,
      const Place& home,
      c10::ScalarType accumulation,
      const RuleStep& step = kAssignStep,
      const kernels::cpu::State& state = {});

  // Copies into an out of the same dtype that lies alike in memory, and returns
  // true; else it does nothing. REQUIRES: as add(); `source` outlives run().
  bool add_copy(
      const at::Tensor& source,
      const Place& home,
      const at::Tensor& out);

  // Launches what has been added. RuntimeError where CUDA has failed.
  void run();

 private:
  struct Home {
    Home(const Place& place_, void* stream);

    Place place;
    kernels::cuda::Launches launches;
  };
  kernels::cuda::Launches& launches_of(const Place& home);
  bool is_plain(const at::Tensor& tensor, const at::Tensor& stored);
  const void* address_of(
      const at::Tensor& value,
      const at::Tensor& stored,
      const Place& home,
      c10::ScalarType dtype);
  void flush_copy();

  Runtime& runtime_;
  StreamOrder& order_;
  PeerAccess& peers_;
  std::vector<std::unique_ptr<Home>> homes_;
  std::vector<at::Tensor> staged_; // until the launch
  const at::Tensor* source_ = nullptr; // of the copies to `outs_`
  Place source_home_;
  c10::SmallVector<void*, 8> outs_;
};

} // namespace torchkv

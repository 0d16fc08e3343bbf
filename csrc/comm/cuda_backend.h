#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "../core/place.h"
#include "../device/stream_order.h"
#include "../kernels/cuda/pack.h"
#include "backend.h"

namespace torchkv {

// The kernels of kernels/cuda: one launch per device, three for rules with
// norms, or a few if dtypes differ. Values on other devices, of another layout
// or of another dtype are copied to the home device first, which allocates, as
// do rules with norms; in a steady state nothing else does.
//
// Work is enqueued on the streams of `order`. REQUIRES: the slices of jobs have
// been entered there, and the home of the current job is the current place.
class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(StreamOrder& order)
      : runtime_(order.runtime()), order_(order) {}

  bool add(const Job& job) override;
  bool add_copy(const Slice& source, const at::Tensor& out) override;
  // RuntimeError if CUDA has failed.
  void run() override;
  double squared_norm(double scale) override;

 private:
  // The values of a key, ready for a kernel.
  struct Sum {
    kernels::cuda::SumJob job;
    c10::SmallVector<const void*, 8> addresses;
  };
  struct Home {
    Home(const Place& place_, StreamOrder& order);

    Place place;
    kernels::cuda::Launches launches;
    std::vector<Sum> norms; // not launched yet
    double* numbers = nullptr; // for rules with norms
    int64_t num_left = 0;
  };
  Home& home_of(const Place& place);
  bool prepare(Sum& sum, const Job& job);
  bool has_kernels(c10::Device device);
  bool is_plain(const at::Tensor& tensor, const at::Tensor& stored);
  const void* address_of(
      const at::Tensor& value,
      const at::Tensor& stored,
      const Place& home,
      c10::ScalarType dtype);
  void flush_copy();
  double* numbers_for(Home& home, int64_t count);

  Runtime& runtime_;
  StreamOrder& order_;
  std::vector<std::unique_ptr<Home>> homes_;
  std::vector<at::Tensor> staged_; // until the launch
  c10::Device device_ = c10::kCPU; // the last that was found to have kernels
  const Slice* source_ = nullptr; // of the copies to `outs_`
  c10::SmallVector<void*, 8> outs_;
};

} // namespace torchkv

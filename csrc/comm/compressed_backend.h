#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>

#include "../kernels/cpu/compressed_sums.h"
#include "backends.h"

namespace torchkv {

// Compressed values (core/compressed.h), after dense ones or none, in CPU
// memory. Rules without a kernel, and those that are not elementwise, get a
// dense sum.
class CompressedBackend final : public Backend {
 public:
  explicit CompressedBackend(Backends& backends) : backends_(backends) {}
  static std::unique_ptr<Backend> make(Backends& backends) {
    return std::make_unique<CompressedBackend>(backends);
  }

  bool add(const Job& job) override;
  bool add_copy(const Slice& /*source*/, const at::Tensor& /*out*/) override {
    return false; // stored values are dense
  }
  void run() override {
    sums_.run();
  }
  double squared_norm(double scale) override {
    return sums_.squared_norm(scale);
  }

 private:
  void add_sum(const Job& job);

  Backends& backends_;
  kernels::cpu::CompressedSumBatch sums_;
  std::list<at::Tensor> totals_; // that jobs point to
};

} // namespace torchkv

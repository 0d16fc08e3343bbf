#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>

#include "../kernels/cpu/row_sums.h"
#include "backends.h"

namespace torchkv {

// Row-sparse values (core/row_sparse.h) and lists of these and dense ones, in
// CPU memory, for contiguous results. Elementwise rules step the rows that were
// pushed, unless they are not lazy; other rules get a dense sum.
class RowSparseBackend final : public Backend {
 public:
  explicit RowSparseBackend(Backends& backends) : backends_(backends) {}
  static std::unique_ptr<Backend> make(Backends& backends) {
    return std::make_unique<RowSparseBackend>(backends);
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
  void add_to(kernels::cpu::RowSumBatch& sums, const Job& job);
  const at::Tensor& payload_as(const Value& value, c10::ScalarType dtype);

  Backends& backends_;
  kernels::cpu::RowSumBatch sums_;
  std::list<at::Tensor> tensors_; // that jobs point to
};

} // namespace torchkv

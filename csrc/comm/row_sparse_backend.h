#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "../kernels/cpu/row_sums.h"
#include "encoded_backend.h"

namespace torchkv {

// Row-sparse values (core/row_sparse.h) and lists of these and dense ones, in
// CPU memory, for contiguous results. Elementwise rules step the rows that were
// pushed, unless they are not lazy; other rules get a dense sum.
class RowSparseBackend final
    : public EncodedBackend<kernels::cpu::RowSumBatch> {
 public:
  using EncodedBackend::EncodedBackend;
  static std::unique_ptr<Backend> make(Backends& backends) {
    return std::make_unique<RowSparseBackend>(backends);
  }

  bool add(const Job& job) override;

 private:
  void add_sum(const Job& job) override;
  const at::Tensor& payload_as(const Value& value, c10::ScalarType dtype);
};

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "../kernels/cpu/row_sums.h"
#include "device_row_sums.h"
#include "encoded_backend.h"

namespace torchkv {

// Row-sparse values (core/row_sparse.h) and lists of these and dense ones, on
// any devices, for contiguous results. Elementwise rules step the rows that
// were pushed, unless they are not lazy; other rules get a dense sum. For
// results in CPU memory, values on accelerators are copied there.
class RowSparseBackend final
    : public EncodedBackend<kernels::cpu::RowSumBatch> {
 public:
  explicit RowSparseBackend(Backends& backends)
      : EncodedBackend(backends), device_sums_(backends.order()) {}
  static std::unique_ptr<Backend> make(Backends& backends) {
    return std::make_unique<RowSparseBackend>(backends);
  }

  bool add(const Job& job) override;
  void run() override;
  double squared_norm(double scale) override;

 private:
  void add_sum(const Job& job) override;
  const at::Tensor& payload_as(const Value& value, c10::ScalarType dtype);

  DeviceRowSums device_sums_; // whose result is on an accelerator
};

} // namespace torchkv

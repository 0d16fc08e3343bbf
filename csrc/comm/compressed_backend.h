#pragma once

#include <memory>

#include "../kernels/cpu/compressed_sums.h"
#include "encoded_backend.h"

namespace torchkv {

// Compressed values (core/compressed.h), after dense ones or none, in CPU
// memory. Rules without a kernel, and those that are not elementwise, get a
// dense sum.
class CompressedBackend final
    : public EncodedBackend<kernels::cpu::CompressedSumBatch> {
 public:
  using EncodedBackend::EncodedBackend;
  static std::unique_ptr<Backend> make(Backends& backends) {
    return std::make_unique<CompressedBackend>(backends);
  }

  bool add(const Job& job) override;

 private:
  void add_sum(const Job& job) override;
};

} // namespace torchkv

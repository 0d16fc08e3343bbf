#pragma once

#include <list>
#include <memory>

#include "../kernels/cpu/compressed_sums.h"
#include "../kernels/cpu/packed_codes.h"
#include "encoded_backend.h"

namespace torchkv {

// Compressed values (core/compressed.h), and dense ones between them: in CPU
// memory, and codes on CUDA devices. The latter, rules without a kernel, and
// those that are not elementwise, get a dense sum.
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

  std::list<kernels::cpu::PackedCodes> codes_; // that sums_ points to
};

} // namespace torchkv

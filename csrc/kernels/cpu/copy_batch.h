#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>

#include "../../core/export.h"

namespace torchkv::kernels::cpu {

// The copies of a call: each source into all its outs, executed together by
// run(). Each source is read once.
//
// REQUIRES: a source and its outs have the same dtype and memory layout, are
// non-overlapping and dense, on the CPU, without conj, neg or zero bits. No out
// overlaps another tensor of the batch, but it may be its own source. Tensors
// outlive run(), which blocks until done. Any thread; versions are not bumped.
class TORCHKV_API CopyBatch {
 public:
  void add(const at::Tensor& source, const at::Tensor& out);
  // Likewise of memory.
  void add(const void* source, size_t num_bytes, void* out);
  void run() const;

 private:
  struct Job {
    const char* source = nullptr;
    int64_t num_bytes = 0;
    size_t outs_end = 0; // in outs_
  };

  c10::SmallVector<char*, 4> outs_;
  c10::SmallVector<Job, 1> jobs_;
};

} // namespace torchkv::kernels::cpu

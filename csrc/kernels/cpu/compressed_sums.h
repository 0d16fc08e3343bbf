#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

#include "../../core/export.h"
#include "../../core/rule.h"
#include "compressed_tile.h"
#include "lines.h"

namespace torchkv::kernels::cpu {

// stored = rule(stored, sent[0] + sent[1] + ...), where sent[i] is what a codec
// sends of source i plus its residual; the residual becomes what is not sent.
// Each number is converted to `accumulation`, in which codecs compute,
// residuals are kept and sent values are added left to right.
//
// REQUIRES: at least one source, all with the memory layout of `stored`, which
// is dense; `accumulation` is fp32 or fp64. A source may be `stored` itself,
// but must not overlap it otherwise. Otherwise as Sum.
struct CompressedSum {
  c10::ArrayRef<CompressedSource> sources;
  int64_t begin; // of the value's elements, the first in `stored`
  const at::Tensor& stored;
  c10::ScalarType accumulation;
  const RuleStep& step = kAssignStep;
  StateLine state = {}; // from the first element of `stored`
};

// Sums of compressed values, executed together by run(), as SumBatch: one pass
// compresses, adds up, steps and writes, without codes or sums in memory.
// REQUIRES: elementwise rules, except for norms.
class TORCHKV_API CompressedSumBatch {
 public:
  void add(const CompressedSum& sum);
  void run() const;

  // As SumBatch::squared_norm, of what run() would add up; residuals stay.
  double squared_norm(double scale) const;

 private:
  struct Job {
    c10::SmallVector<CompressedSource, 4> sources;
    int64_t begin = 0;
    int64_t num_elements = 0;
    int64_t bytes_per_element = 0;
    char* stored = nullptr;
    c10::ScalarType dtype = c10::kFloat;
    int64_t stored_size = 0;
    c10::ScalarType accumulation = c10::kFloat;
    const RuleStep* step = nullptr;
    StateLine state;
    int64_t bytes_of_state = 0;
  };

  // Of the tiles [begin, end).
  template <typename T>
  static void step_tiles(
      const Job& job,
      int64_t begin,
      int64_t end,
      bool stream);
  template <typename T>
  static double tile_norm(
      const Job& job,
      int64_t first,
      int64_t size,
      double scale);

  std::vector<Job> jobs_;
};

} // namespace torchkv::kernels::cpu

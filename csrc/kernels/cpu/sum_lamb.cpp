#include <cmath>
#include <vector>

#include "chunks.h"
#include "lamb.h"
#include "sum.h"

namespace torchkv::kernels::cpu {
namespace {

// The factor that brings the squares of fp64 numbers of such a 2-norm into
// fp64's range.
double scale_for(double norm) {
  constexpr double kScale = 0x1p600;
  return norm > 0x1p500 ? 1 / kScale : norm < 0x1p-450 ? kScale : 1;
}

} // namespace

// The second half of LAMB: the norms of weights and directions, then the steps.
void SumBatch::run_lamb() const {
  using Norms = LambLine::Norms;
  const auto line_of = [&](int64_t i, int64_t first) {
    const Job& job = jobs_[i];
    char* const stored =
        job.stored + first * static_cast<int64_t>(c10::elementSize(job.dtype));
    return LambLine(*job.step, job.dtype, stored, state_of(i, first));
  };
  const auto chunks_of = [&](auto is_included) {
    Chunks chunks;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      const bool is_lamb = jobs_[i].step->rule.id == RuleSpec::Id::kLamb;
      chunks.add_job(
          is_lamb && is_included(i) ? jobs_[i].num_elements : 0,
          jobs_[i].bytes_per_element);
    }
    return chunks;
  };
  std::vector<Norms> scales(jobs_.size(), {1, 1});
  std::vector<Norms> norms(jobs_.size());
  const auto find_norms = [&](const Chunks& chunks) {
    std::vector<Norms> squares(chunks.size());
    chunks.for_each([&](int64_t i, int64_t chunk, int64_t first, int64_t size) {
      squares[chunk] = line_of(i, first).squared_norms(size, scales[i]);
    });
    for (size_t i = 0; i < jobs_.size(); ++i) {
      Norms sum;
      for (int64_t chunk = chunks.end(i); chunk < chunks.end(i + 1); ++chunk) {
        sum.weight += squares[chunk].weight;
        sum.direction += squares[chunk].direction;
      }
      if (chunks.end(i) != chunks.end(i + 1)) {
        norms[i] = {
            std::sqrt(sum.weight) / scales[i].weight,
            std::sqrt(sum.direction) / scales[i].direction};
      }
    }
  };
  const Chunks all = chunks_of([](size_t /*i*/) { return true; });
  find_norms(all);
  const Chunks out_of_range = chunks_of([&](size_t i) {
    if (c10::toRealValueType(jobs_[i].dtype) == c10::kDouble) {
      scales[i] = {scale_for(norms[i].weight), scale_for(norms[i].direction)};
    }
    return scales[i].weight != 1 || scales[i].direction != 1;
  });
  if (out_of_range.size() != 0) {
    find_norms(out_of_range);
  }
  all.for_each([&](int64_t i, int64_t /*chunk*/, int64_t first, int64_t size) {
    line_of(i, first).move(norms[i].trust(), size);
  });
}

} // namespace torchkv::kernels::cpu

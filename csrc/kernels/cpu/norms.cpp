#include "norms.h"

#include <cmath>
#include <numeric>
#include <vector>

#include "../../core/step_rate.h"
#include "apply_rule.h"
#include "chunks.h"

namespace torchkv::kernels::cpu {

template <typename T>
double norm_of(const T* numbers, int64_t count) {
  const auto norm_by = [&](double scale) {
    Chunks chunks(kNormChunk);
    chunks.add_job(count, sizeof(T));
    std::vector<double> sums(chunks.size());
    chunks.for_each(
        [&](int64_t /*job*/, int64_t chunk, int64_t first, int64_t size) {
          sums[chunk] = squared_norm(numbers + first, size, scale);
        });
    return std::sqrt(std::accumulate(sums.begin(), sums.end(), 0.0)) / scale;
  };
  const double norm = norm_by(1);
  const double scale = sizeof(T) == sizeof(double) ? scale_for(norm) : 1;
  return scale == 1 ? norm : norm_by(scale);
}

template double norm_of(const float* numbers, int64_t count);
template double norm_of(const double* numbers, int64_t count);

RuleStep elementwise_step(
    const RuleStep& step,
    c10::ScalarType dtype,
    const char* stored,
    const char* master,
    int64_t num_elements,
    double gradient_norm) {
  const char* const weights = master != nullptr ? master : stored;
  const int64_t count = num_elements * (c10::isComplexType(dtype) ? 2 : 1);
  const double weight_norm = c10::toRealValueType(dtype) == c10::kDouble
      ? norm_of(reinterpret_cast<const double*>(weights), count)
      : norm_of(reinterpret_cast<const float*>(weights), count);
  return scaled_by_norms(
      step, weight_norm, gradient_norm * std::abs(step.last_scale));
}

} // namespace torchkv::kernels::cpu

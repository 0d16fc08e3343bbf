#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../../core/rule.h"

namespace torchkv::kernels::cpu {

// 2-norms, or their squares, of a weight and of its gradient or, for LAMB, of
// the direction of its step.
struct Norms {
  double weight = 0;
  double step = 0;
};

// The factor that brings the squares of fp64 numbers of such a 2-norm into
// fp64's range.
constexpr double scale_for(double norm) {
  constexpr double kScale = 0x1p600;
  return norm > 0x1p500 ? 1 / kScale : norm < 0x1p-450 ? kScale : 1;
}

constexpr int64_t kNormChunk = int64_t{16} * 1024; // elements

// The 2-norm of numbers, float or double. The same bits for any number of
// threads.
template <typename T>
double norm_of(const T* numbers, int64_t count);

// The step of a rule that needs_gradient_norm(): of a whole weight, with its
// master or null, and with the norm of its gradient before `last_scale`.
RuleStep elementwise_step(
    const RuleStep& step,
    c10::ScalarType dtype,
    const char* stored,
    const char* master,
    int64_t num_elements,
    double gradient_norm);

} // namespace torchkv::kernels::cpu

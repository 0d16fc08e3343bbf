#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "../core/rule.h"

namespace torchkv {

// Some rows of a weight, whose copies are stepped in its place.
struct RowsOfWeight {
  at::Tensor whole; // has the norm that a learning rate may need
  // Their numbers from 0: int64, on the device. Random numbers are those of
  // their places, where RuleStep::stream is that of row 0.
  at::Tensor ids;
};

// Applies a rule by ATen operators, on devices without kernels: the formulas of
// kernels/rules.h on whole tensors. Writes `weight` and `states` in place;
// overwrites `gradient`. All of one shape and device; `weight` and states in
// fp32, fp64 or complex numbers of these. If `rows` is not null, all are these
// rows, contiguous. REQUIRES: PlainDispatch.
void step_with_aten(
    const RuleStep& step,
    const at::Tensor& gradient,
    const at::Tensor& weight,
    std::array<at::Tensor, kMaxStates> states,
    const RowsOfWeight* rows = nullptr);

// The squared 2-norm of a gradient as the rule would see it without last_scale,
// each number multiplied by `scale`: a number of fp64 on its device. Overwrites
// `gradient`.
at::Tensor squared_norm_with_aten(
    const RuleStep& step,
    const at::Tensor& gradient,
    double scale);

// The 2-norm of real numbers, as an fp64 number on their device.
at::Tensor norm_of(const at::Tensor& numbers);

} // namespace torchkv

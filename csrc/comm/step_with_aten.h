#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "../core/rule.h"

namespace torchkv {

// Applies a rule by ATen operators, on devices without kernels: the formulas of
// kernels/rules.h on whole tensors. Writes `weight` and `states` in place;
// overwrites `gradient`. All of one shape and device; `weight` and states in
// fp32, fp64 or complex numbers of these. REQUIRES: PlainDispatch.
void step_with_aten(
    const RuleStep& step,
    const at::Tensor& gradient,
    const at::Tensor& weight,
    std::array<at::Tensor, kMaxStates> states);

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

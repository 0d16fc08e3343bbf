#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "../core/rule.h"
#include "step_with_aten.h"

namespace torchkv {

// step_with_aten for one of MXNet's rules, on real numbers. `gradient` is
// scaled and clipped as the step says, and is overwritten.
void mxnet_step_with_aten(
    const RuleStep& step,
    at::Tensor gradient,
    at::Tensor weight,
    std::array<at::Tensor, kMaxStates> states,
    const RowsOfWeight* rows);

} // namespace torchkv

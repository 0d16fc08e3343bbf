#pragma once

#include <array>
#include <cstdint>

#include "../rules.h"

namespace torchkv::kernels::cpu {

// Applies a rule to a block of gradients `g`, weights `w` and state, all float
// or all double. Overwrites the gradients.
template <typename T>
void apply_rule(
    const RuleStep& step,
    const RuleNumbers<T>& numbers,
    T* g,
    T* w,
    const std::array<T*, kMaxStates>& states,
    int64_t num_numbers);

// The squared 2-norm of the gradients as the rule sees them before
// `last_scale`, each multiplied by `scale` in fp64. Overwrites the gradients.
template <typename T>
double squared_norm(
    const RuleStep& step,
    T* g,
    int64_t num_numbers,
    double scale);

} // namespace torchkv::kernels::cpu

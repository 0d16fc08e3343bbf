#pragma once

#include <array>
#include <cstdint>

#include "../rules.h"

namespace torchkv::kernels::cpu {

// A block of gradients, weights and state, all float or all double.
template <typename T>
struct RuleBlock {
  const T* gradients;
  T* scratch; // for as many numbers; may be the gradients
  T* weights;
  std::array<T*, kMaxStates> states; // null if not used
  int64_t num_numbers;
  int64_t begin; // numbers of the stored tensor before the block
};

template <typename T>
void apply_rule(
    const RuleStep& step,
    const RuleNumbers<T>& numbers,
    const RuleBlock<T>& block);

// The squared 2-norm of the gradients as the rule sees them before
// `last_scale`, each multiplied by `scale` in fp64. Overwrites the gradients.
template <typename T>
double squared_norm(
    const RuleStep& step,
    T* g,
    int64_t num_numbers,
    double scale);

// The sum of the squares of numbers, each multiplied by `scale` in fp64.
template <typename T>
double squared_norm(const T* numbers, int64_t count, double scale);

// The gradients as rules of MXNet see them that apply clip_gradient before all
// else. In place.
template <typename T>
void make_limited_gradient(const RuleStep& step, T* g, int64_t num_numbers);

} // namespace torchkv::kernels::cpu

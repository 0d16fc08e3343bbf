#pragma once

#include "dtypes.h"
#include "sum_thread.h"

// Maps a Variant to its Sum.
namespace torchkv::kernels::cuda {

template <typename P>
constexpr Variant variant_of() {
  return {
      dtype_of<typename P::value_t>(),
      dtype_of<typename P::stored_t>(),
      P::kRule,
      P::kValues};
}

// Calls `f` with the Sum of `variant` if it is one of these and is built.
template <typename V, typename S, Rule kRule, int... kNumValues, typename F>
bool dispatch_num_values(const Variant& variant, F f) {
  const auto call = [&](auto number) {
    constexpr int kN = decltype(number)::value;
    using P = Sum<V, S, kRule, kN>;
    if constexpr (is_built(variant_of<P>())) {
      if (variant.num_values == kN) {
        f(P());
        return true;
      }
    }
    return false;
  };
  return (call(std::integral_constant<int, kNumValues>()) || ...);
}

template <typename V, typename S, Rule... kRules, typename F>
bool dispatch_rule(const Variant& variant, F f) {
  return (
      (variant.rule == kRules &&
       dispatch_num_values<V, S, kRules, 0, 1, 2, 3, 4, 8>(variant, f)) ||
      ...);
}

// `variant.value` is V.
template <typename V, typename F>
bool dispatch_sum(const Variant& variant, F f) {
  const auto with = [&](auto stored) {
    using S = decltype(stored);
    return variant.stored == dtype_of<S>() &&
        dispatch_rule<
               V,
               S,
               Rule::kAssign,
               Rule::kSgd,
               Rule::kAdam,
               Rule::kOther,
               Rule::kNorm,
               Rule::kMeasure,
               Rule::kScaled>(variant, f);
  };
  if constexpr (is_half(dtype_of<V>())) {
    return with(V()) || with(float());
  } else {
    return with(V());
  }
}

} // namespace torchkv::kernels::cuda

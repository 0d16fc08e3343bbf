#include "lamb.h"

#include <ATen/OpMathType.h>

#include <array>
#include <cmath>

#include "../../core/step_rate.h"
#include "../rules.h"
#include "clones.h"

namespace torchkv::kernels::cpu {
namespace {

// The lanes of a sum of squares, which the compiler vectorizes without
// reordering additions.
constexpr int64_t kLanes = 8;

template <typename T>
TORCHKV_CLONES void add_squares(
    const RuleNumbers<T>& numbers,
    const T* w,
    const T* average,
    const T* average_sq,
    int64_t num_numbers,
    Norms scales,
    double* weight_lanes,
    double* direction_lanes) {
  const RuleNumbers<T> n = numbers;
  for (int64_t i = 0; i + kLanes <= num_numbers; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t j = i + lane;
      const double weight = w[j] * scales.weight;
      const double direction =
          lamb_direction(w[j], average[j], average_sq[j], n) * scales.step;
      weight_lanes[lane] += weight * weight;
      direction_lanes[lane] += direction * direction;
    }
  }
  for (int64_t j = num_numbers / kLanes * kLanes; j < num_numbers; ++j) {
    const double weight = w[j] * scales.weight;
    const double direction =
        lamb_direction(w[j], average[j], average_sq[j], n) * scales.step;
    weight_lanes[0] += weight * weight;
    direction_lanes[0] += direction * direction;
  }
}

template <typename T>
TORCHKV_CLONES void move_weights(
    const RuleNumbers<T>& numbers,
    T rate,
    T* __restrict w,
    const T* __restrict average,
    const T* __restrict average_sq,
    int64_t num_numbers) {
  const RuleNumbers<T> n = numbers;
  for (int64_t i = 0; i < num_numbers; ++i) {
    w[i] = w[i] - rate * lamb_direction(w[i], average[i], average_sq[i], n);
  }
}

} // namespace

LambLine::LambLine(
    const RuleStep& step,
    c10::ScalarType dtype,
    char* stored,
    const StateLine& state)
    : step_(step),
      dtype_(dtype),
      arithmetic_(at::toOpMathType(dtype)),
      stored_(stored),
      state_(state) {}

template <typename T>
T* LambLine::weights() const {
  return reinterpret_cast<T*>(
      state_.master != nullptr ? state_.master : stored_);
}

Norms LambLine::squared_norms(int64_t num_elements, const Norms& scales) const {
  std::array<double, kLanes> weight{};
  std::array<double, kLanes> direction{};
  const auto add = [&](auto zero) {
    using T = decltype(zero);
    add_squares<T>(
        RuleNumbers<T>(step_),
        weights<T>(),
        reinterpret_cast<const T*>(state_.states[0]),
        reinterpret_cast<const T*>(state_.states[1]),
        num_elements * (c10::isComplexType(dtype_) ? 2 : 1),
        scales,
        weight.data(),
        direction.data());
  };
  c10::toRealValueType(arithmetic_) == c10::kDouble ? add(double())
                                                    : add(float());
  Norms sum;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    sum.weight += weight[lane];
    sum.step += direction[lane];
  }
  return sum;
}

void LambLine::move(const Norms& norms, int64_t num_elements) const {
  const double rate = step_.rule.lr *
      norm_ratio(step_.rule, step_.scale, norms.weight, norms.step);
  const auto move = [&](auto zero) {
    using T = decltype(zero);
    move_weights<T>(
        RuleNumbers<T>(step_),
        static_cast<T>(rate),
        weights<T>(),
        reinterpret_cast<const T*>(state_.states[0]),
        reinterpret_cast<const T*>(state_.states[1]),
        num_elements * (c10::isComplexType(dtype_) ? 2 : 1));
  };
  c10::toRealValueType(arithmetic_) == c10::kDouble ? move(double())
                                                    : move(float());
  if (state_.master != nullptr) {
    const std::array<const char*, 1> master{state_.master};
    SumLine(
        {arithmetic_},
        dtype_,
        arithmetic_,
        kAssignStep,
        SumLine::Layout::kDense)
        .dense(master.data(), stored_, {}, num_elements, /*stream=*/false);
  }
}

} // namespace torchkv::kernels::cpu

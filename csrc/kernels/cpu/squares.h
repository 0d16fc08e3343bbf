#pragma once

#include <cstdint>

namespace torchkv::kernels::cpu {

// The sum of the squares of numbers, each multiplied by `scale`: in lanes,
// which the compiler vectorizes without reordering additions. Inlined into
// functions that have clones.
template <typename T>
[[gnu::always_inline]] inline double sum_of_squares(
    const T* numbers,
    int64_t count,
    double scale = 1) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double number = numbers[i + lane] * scale;
      lanes[lane] += number * number;
    }
  }
  double sum = 0;
  for (; i < count; ++i) {
    const double number = numbers[i] * scale;
    sum += number * number;
  }
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
}

} // namespace torchkv::kernels::cpu

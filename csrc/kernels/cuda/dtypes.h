#pragma once

#include <type_traits>

#include "params.h"
#include "types.h"

// Maps a Dtype to its type.
namespace torchkv::kernels::cuda {

template <typename T>
constexpr Dtype dtype_of() {
  return std::is_same_v<T, float>   ? Dtype::kFloat
      : std::is_same_v<T, Half>     ? Dtype::kHalf
      : std::is_same_v<T, BFloat16> ? Dtype::kBFloat16
      : std::is_same_v<T, double>   ? Dtype::kDouble
      : std::is_same_v<T, Bool>     ? Dtype::kBool
      : sizeof(T) == 1              ? Dtype::kInt8
      : sizeof(T) == 2              ? Dtype::kInt16
      : sizeof(T) == 4              ? Dtype::kInt32
                                    : Dtype::kInt64;
}

// Calls `f` with a value of the type, and returns whether there is one.
template <typename F>
bool dispatch_dtype(Dtype dtype, F f) {
  const auto call = [&](auto value) {
    if (dtype_of<decltype(value)>() != dtype) {
      return false;
    }
    f(value);
    return true;
  };
  return call(float()) || call(Half()) || call(BFloat16()) || call(double()) ||
      call(Bool()) || call(uint8_t()) || call(uint16_t()) || call(uint32_t()) ||
      call(uint64_t());
}

} // namespace torchkv::kernels::cuda

#pragma once

#include <cstdint>
#include <type_traits>

#include "half.h"

// The types of tensors and of the arithmetic on them.
namespace torchkv::kernels::cuda {

// A byte that is true if it is not 0.
enum class Bool : uint8_t {};

template <typename T>
struct Arithmetic {
  using type = T;
};
template <>
struct Arithmetic<Half> {
  using type = float;
};
template <>
struct Arithmetic<BFloat16> {
  using type = float;
};
// The type in which values of type T are added.
template <typename T>
using arithmetic_t = typename Arithmetic<T>::type;

template <typename T>
TORCHKV_HOST_DEVICE inline arithmetic_t<T> widen(T number) {
  if constexpr (std::is_same_v<T, arithmetic_t<T>>) {
    return number;
  } else {
    return to_float(number);
  }
}

template <typename T>
TORCHKV_HOST_DEVICE inline T narrow(arithmetic_t<T> number) {
  if constexpr (std::is_same_v<T, Bool>) {
    return static_cast<Bool>(number != Bool());
  } else if constexpr (std::is_same_v<T, arithmetic_t<T>>) {
    return number;
  } else {
    T result;
    round_to(result, number);
    return result;
  }
}

template <typename T>
TORCHKV_HOST_DEVICE inline T add(T a, T b) {
  if constexpr (std::is_same_v<T, Bool>) {
    // Like torch.add.
    return static_cast<Bool>(static_cast<uint8_t>(a) | static_cast<uint8_t>(b));
  } else {
    return static_cast<T>(a + b);
  }
}

// The neutral element of addition.
template <typename T>
TORCHKV_HOST_DEVICE inline T nothing() {
  if constexpr (std::is_floating_point_v<T>) {
    return -T(0); // + -0.0 is -0.0, and 0.0 + -0.0 is not
  } else {
    return T();
  }
}

} // namespace torchkv::kernels::cuda

#include "access.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/TypeCast.h>
#include <c10/util/complex.h>

#include <cstring>
#include <type_traits>

#include "half_precision.h"

namespace torchkv::kernels::cpu {
namespace {

// Dtypes with specialized kernels.
template <typename acc_t, typename T>
constexpr bool kIsHalfPrecision = std::is_same_v<acc_t, float> &&
    (std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>);

template <typename acc_t>
acc_t add(acc_t a, acc_t b) {
  if constexpr (std::is_same_v<acc_t, bool>) {
    return a || b; // as torch.add
  } else if constexpr (std::is_integral_v<acc_t>) {
    using unsigned_t = std::make_unsigned_t<acc_t>;
    return static_cast<acc_t>(
        static_cast<unsigned_t>(a) + static_cast<unsigned_t>(b));
  } else {
    return a + b;
  }
}

template <typename T>
T read(const char* address) {
  T value;
  if constexpr (std::is_same_v<T, bool>) {
    value = *address != 0; // a C++ bool may only be 0 or 1
  } else {
    std::memcpy(&value, address, sizeof(T));
  }
  return value;
}

// total = or += `num_elements` numbers of type T.
template <typename acc_t, typename T>
void load(
    const char* source,
    int64_t stride,
    bool is_add,
    acc_t* total,
    int64_t num_elements) {
  constexpr auto kDense = static_cast<int64_t>(sizeof(T));
  if constexpr (kIsHalfPrecision<acc_t, T>) {
    if (stride == kDense) {
      load_half_precision<T>(source, is_add, total, num_elements);
      return;
    }
  }
  // Separate loops for dense and repeated numbers, which the compiler
  // vectorizes.
  const auto each = [&](auto combine) {
    if (stride == 0) {
      const auto value = c10::convert<acc_t>(read<T>(source));
      for (int64_t i = 0; i < num_elements; ++i) {
        combine(total[i], value);
      }
    } else if (stride == kDense) {
      for (int64_t i = 0; i < num_elements; ++i) {
        combine(total[i], c10::convert<acc_t>(read<T>(source + i * kDense)));
      }
    } else {
      for (int64_t i = 0; i < num_elements; ++i) {
        combine(total[i], c10::convert<acc_t>(read<T>(source + i * stride)));
      }
    }
  };
  if (is_add) {
    each([](acc_t& sum, acc_t value) { sum = add(sum, value); });
  } else {
    each([](acc_t& sum, acc_t value) { sum = value; });
  }
}

template <typename acc_t, typename T>
void store(
    const acc_t* total,
    char* result,
    int64_t stride,
    int64_t num_elements) {
  if constexpr (kIsHalfPrecision<acc_t, T>) {
    if (stride == static_cast<int64_t>(sizeof(T))) {
      store_half_precision<T>(total, result, num_elements);
      return;
    }
  }
  for (int64_t i = 0; i < num_elements; ++i) {
    const T value = c10::convert<T>(total[i]);
    std::memcpy(result + i * stride, &value, sizeof(T));
  }
}

} // namespace

template <typename acc_t>
Access<acc_t> access(c10::ScalarType dtype) {
  return AT_DISPATCH_V2(
      dtype,
      "torchkv sum",
      AT_WRAP([&] {
        return Access<acc_t>{&load<acc_t, scalar_t>, &store<acc_t, scalar_t>};
      }),
      AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX),
      AT_EXPAND(AT_FLOAT8_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      at::kBool,
      at::kHalf,
      at::kBFloat16,
      at::kComplexHalf);
}

template Access<bool> access(c10::ScalarType dtype);
template Access<float> access(c10::ScalarType dtype);
template Access<double> access(c10::ScalarType dtype);
template Access<int64_t> access(c10::ScalarType dtype);
template Access<c10::complex<float>> access(c10::ScalarType dtype);
template Access<c10::complex<double>> access(c10::ScalarType dtype);

} // namespace torchkv::kernels::cpu

#pragma once

// The formulas of the codecs of gradient compression, for one number: `value`
// is the pushed number plus the residual. Without branches, so that compilers
// vectorize loops over them.

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../core/host_device.h"

#define TORCHKV_CODEC TORCHKV_HOST_DEVICE inline __attribute__((always_inline))

namespace torchkv::codecs {

constexpr float kFp8Max = 448; // of e4m3
constexpr float kInt4Max = 7;
constexpr float kFp16Max = 65504;
constexpr float kBf16Max = 0x1.FEp127;
// Constants, because GPU code may not call std::numeric_limits' functions.
template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();
template <typename T>
constexpr T kNan = std::numeric_limits<T>::quiet_NaN();
template <typename T>
constexpr T kLeastNormal = std::numeric_limits<T>::min();

// The bits of a number without its sign: as integers in the order of the
// magnitudes, with infinity and then NaN above all others.
template <typename T>
using bits_t = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

template <typename T>
TORCHKV_CODEC bits_t<T> magnitude_bits(T value) {
  bits_t<T> bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & (~bits_t<T>{0} >> 1U);
}

template <typename T>
TORCHKV_CODEC T from_bits(bits_t<T> bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
TORCHKV_CODEC bool is_finite(T value) {
  return magnitude_bits(value) < magnitude_bits(kInfinity<T>);
}

// `a` where the condition holds, else `b`: by bits, so that compilers make no
// branch around arithmetic of one of the two.
template <typename T>
TORCHKV_CODEC T either(bool condition, T a, T b) {
  bits_t<T> a_bits;
  bits_t<T> b_bits;
  std::memcpy(&a_bits, &a, sizeof(a));
  std::memcpy(&b_bits, &b, sizeof(b));
  const bits_t<T> mask = bits_t<T>{0} - static_cast<bits_t<T>>(condition);
  return from_bits<T>((a_bits & mask) | (b_bits & ~mask));
}

// MXNet's, with the residual value - sent.
template <typename T>
TORCHKV_CODEC T sent_1bit(T value, T threshold) {
  return either(value > threshold, T(1), T(-1));
}
template <typename T>
TORCHKV_CODEC T sent_2bit(T value, T threshold) {
  const T low = either(value <= -threshold, -threshold, T(0));
  return either(value >= threshold, threshold, low);
}

// The residual of the other codecs: numbers that are not finite are sent, and
// leave none.
template <typename T>
TORCHKV_CODEC T residual_of(T value, T sent) {
  const T rest = value - sent;
  return either(is_finite(rest), rest, T(0));
}

template <typename T>
TORCHKV_CODEC T within(T value, T least, T most) {
  const T low = either(value < least, least, value);
  return either(low > most, most, low);
}

// A finite number within [-most, most]; others unchanged.
template <typename T>
TORCHKV_CODEC T limited(T value, T most) {
  return either(is_finite(value), within(value, -most, most), value);
}

TORCHKV_HOST_DEVICE constexpr float power_of_2(int exponent) {
  float result = 1;
  for (; exponent > 0; --exponent) {
    result *= 2;
  }
  for (; exponent < 0; ++exponent) {
    result /= 2;
  }
  return result;
}

// To the nearest number of a format with `kDropped` bits of mantissa less, ties
// to even. Normal numbers of the format begin at 2^kLeast; smaller ones are
// multiples of 2^(kLeast + kDropped - 23). REQUIRES: no overflow.
template <uint32_t kDropped, int kLeast>
TORCHKV_CODEC float rounded(float value) {
  constexpr uint32_t kUnit = uint32_t{1} << kDropped;
  constexpr int32_t kLeastBits = (127 + kLeast) * 0x800000;
  // Floats of this size are multiples of that distance.
  constexpr float kMagic =
      1.5F * power_of_2(kLeast + static_cast<int>(kDropped));
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t near =
      (bits + (kUnit / 2 - 1) + ((bits >> kDropped) & 1U)) & ~(kUnit - 1);
  const float subnormal = (value + kMagic) - kMagic;
  const float result = either(
      static_cast<int32_t>(magnitude_bits(value)) < kLeastBits,
      subnormal,
      from_bits<float>(near));
  return either(is_finite(value), result, value);
}

template <typename T>
TORCHKV_CODEC T sent_fp16(T value) {
  return T(rounded<13, -14>(static_cast<float>(limited(value, T(kFp16Max)))));
}
template <typename T>
TORCHKV_CODEC T sent_bf16(T value) {
  return T(rounded<16, -127>(static_cast<float>(limited(value, T(kBf16Max)))));
}

// The scale of a block whose greatest finite magnitude is `largest`, and its
// inverse; zeros, with which nothing is sent, where they would be subnormal.
template <typename T>
struct Scale {
  T scale;
  T inverse;
};
template <typename T>
TORCHKV_CODEC Scale<T> scale_of(T largest, float most) {
  const Scale<T> result{largest / T(most), T(most) / largest};
  const bool is_normal =
      result.scale >= kLeastNormal<T> && result.inverse >= kLeastNormal<T>;
  return is_normal ? result : Scale<T>{0, 0};
}

// fp8 and int4 have no infinity: what is not finite is sent as NaN.
template <typename T>
TORCHKV_CODEC T sent_fp8(T value, Scale<T> scale) {
  const T scaled = within(value * scale.inverse, -T(kFp8Max), T(kFp8Max));
  const T sent = T(rounded<20, -6>(static_cast<float>(scaled))) * scale.scale;
  return either(is_finite(value), sent, kNan<T>);
}

// 32-bit numbers whose high bits look random: Chris Wellons' "lowbias32"
// without its last step, which mixes the low ones.
TORCHKV_CODEC uint32_t mixed(uint32_t bits) {
  bits = (bits ^ (bits >> 16U)) * 0x7FEB352DU;
  return (bits ^ (bits >> 15U)) * 0x846CA68BU;
}
// 8 plus a random number in [0, 1) of 20 bits: floats from 8 to 16 are
// multiples of 2^-20.
TORCHKV_CODEC float random_from_8(uint32_t bits) {
  return from_bits<float>(0x41000000U | (mixed(bits) >> 12U));
}
// Rounded up with the probability that makes the mean right; a whole number of
// scales is sent as it is, because the sum is then exact. Sums are positive, so
// that truncating is rounding down.
template <typename T>
TORCHKV_CODEC T sent_int4_of_finite(T value, Scale<T> scale, float random) {
  const T shifted = value * scale.inverse + T(random);
  const auto rounded = static_cast<int32_t>(shifted);
  // Rounding errors may leave the range.
  const int32_t low = rounded < 1 ? 1 : rounded;
  return T((low > 15 ? 15 : low) - 8) * scale.scale;
}
template <typename T>
TORCHKV_CODEC T sent_int4(T value, Scale<T> scale, float random) {
  const T finite = either(is_finite(value), value, T(0)); // NaN is no integer
  return either(
      is_finite(value), sent_int4_of_finite(finite, scale, random), kNan<T>);
}

template <typename T>
TORCHKV_CODEC T
sent_topk(T value, bits_t<T> least, int64_t index, int64_t ties_end) {
  const bits_t<T> bits = magnitude_bits(value);
  const bool is_tie = (bits == least) & (index < ties_end);
  return either((bits > least) | is_tie, value, T(0));
}

} // namespace torchkv::codecs

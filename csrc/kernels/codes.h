#pragma once

// The codes of what codecs send, integers of few bits, for one number. Without
// branches, as codecs.h. For each codec but topk and the half types: the code
// of a number that is sent, and the number of a code.

#include <cstdint>
#include <cstring>

#include "codecs.h"

namespace torchkv::codecs {

// Of 1 bit.
template <typename T>
TORCHKV_CODEC uint32_t code_1bit(T sent) {
  return sent > 0 ? 1U : 0U;
}
template <typename T>
TORCHKV_CODEC T number_1bit(uint32_t code) {
  return code != 0 ? T(1) : T(-1);
}

// Of 2 bits. 0, 1: the threshold, 2: its negative.
template <typename T>
TORCHKV_CODEC uint32_t code_2bit(T sent) {
  return (sent > 0 ? 1U : 0U) | (sent < 0 ? 2U : 0U);
}
template <typename T>
TORCHKV_CODEC T number_2bit(uint32_t code, T threshold) {
  const T low = code == 2 ? -threshold : T(0);
  return code == 1 ? threshold : low;
}

// Of 4 bits. 1 to 15: -7 to 7 scales; 0: NaN. What is sent is such a multiple
// of the scale, rounded, so that multiplying it by the inverse is off by far
// less than a half.
template <typename T>
TORCHKV_CODEC uint32_t code_int4(T sent, T inverse) {
  const T shifted = either(is_finite(sent), sent, T(0)) * inverse + T(8.5);
  const auto code = static_cast<uint32_t>(static_cast<int32_t>(shifted));
  return is_finite(sent) ? code : 0;
}
template <typename T>
TORCHKV_CODEC T number_int4(uint32_t code, T scale) {
  const T number = T(static_cast<int32_t>(code) - 8) * scale;
  return code != 0 ? number : kNan<T>;
}

constexpr uint32_t kFp8Bias = (127 - 7) * 8; // in units of the mantissa
// The bits of 2^-6, the least normal one, as a float.
constexpr uint32_t kFp8Normal = uint32_t{127 - 6} << 23U;
constexpr float kFp8PerUnit = 512; // subnormal ones
constexpr uint32_t kFp8Nan = 0x7F;

// Of 8 bits. What is sent is a number of e4m3 times the scale, rounded. A
// number has the bits of a float but for the exponent's bias, if it is normal;
// else it is a multiple of 2^-9.
template <typename T>
TORCHKV_CODEC uint32_t code_fp8(T sent, T inverse) {
  const T finite = either(is_finite(sent), sent, T(0));
  const float number = rounded<20, -6>(static_cast<float>(finite * inverse));
  const uint32_t bits = magnitude_bits(number);
  const uint32_t normal = (bits >> 20U) - kFp8Bias;
  const auto subnormal = static_cast<uint32_t>(
      static_cast<int32_t>(from_bits<float>(bits) * kFp8PerUnit));
  const uint32_t code = bits < kFp8Normal ? subnormal : normal;
  uint32_t sign;
  std::memcpy(&sign, &number, sizeof(sign));
  return is_finite(sent) ? ((sign >> 24U) & 0x80U) | code : kFp8Nan;
}
template <typename T>
TORCHKV_CODEC T number_fp8(uint32_t code, T scale) {
  const uint32_t magnitude = code & 0x7FU;
  const auto normal = from_bits<float>((magnitude + kFp8Bias) << 20U);
  const float subnormal =
      static_cast<float>(static_cast<int32_t>(magnitude)) / kFp8PerUnit;
  const float number = either(magnitude < 8, subnormal, normal);
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  const auto value = from_bits<float>(bits | ((code & 0x80U) << 24U));
  return either(magnitude == kFp8Nan, kNan<T>, T(value) * scale);
}

} // namespace torchkv::codecs

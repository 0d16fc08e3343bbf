#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace torchkv {

// A number of the standard normal distribution, from 64 random bits: by Box and
// Muller's method, with 24 bits for each of its two uniform numbers, so its
// magnitude is at most 5.8. Series instead of library functions, so that all
// processors give the same bits; their errors are below those of rounding.
TORCHKV_HOST_DEVICE inline float normal_number(uint64_t bits) {
  // log(u), u in (0, 1], as log(m) + exponent * log(2), m in [0.707, 1.414).
  const auto u =
      static_cast<float>(static_cast<int32_t>(bits >> 40U) + 1) * 0x1p-24F;
  constexpr uint32_t kFromLeastMTo1 = 0x3F800000 - 0x3F3504F3; // in bits
  uint32_t bits_of_u;
  std::memcpy(&bits_of_u, &u, sizeof(u));
  const int32_t exponent =
      static_cast<int32_t>((bits_of_u + kFromLeastMTo1) >> 23U) - 127;
  const uint32_t bits_of_m =
      bits_of_u - static_cast<uint32_t>(exponent) * 0x800000U;
  float m;
  std::memcpy(&m, &bits_of_m, sizeof(m));
  const float s = (m - 1) / (m + 1);
  const float s2 = s * s;
  const float artanh =
      s * (1 + s2 * (1.F / 3 + s2 * (1.F / 5 + s2 * (1.F / 7 + s2 / 9))));
  const float log = 2 * artanh + static_cast<float>(exponent) * 0.69314718F;

  // cos(2 pi v), v in [-1/2, 1/2), as sin(x) with |x| <= pi / 2.
  const auto v =
      static_cast<float>(static_cast<int32_t>(bits & 0xFFFFFFU) - 0x800000) *
      0x1p-24F;
  const float x = 6.2831853F * (0.25F - (v < 0 ? -v : v));
  const float x2 = x * x;
  const float sine = x *
      (1 -
       x2 / 6 * (1 - x2 / 20 * (1 - x2 / 42 * (1 - x2 / 72 * (1 - x2 / 110)))));
  return std::sqrt(-2 * log) * sine;
}

} // namespace torchkv

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

namespace torchkv::kernels::cpu {

// bfloat16 is the upper half of a float. A macro, so that it works on vectors.
#define TORCHKV_ROUND_BFLOAT16(bits)             \
  (((bits) & 0x7FFFFFFFU) > 0x7F800000U          \
       ? (bits) - (bits) + 0x7FC00000U /* NaN */ \
       : (bits) + 0x7FFFU + (((bits) >> 16U) & 1U) /* to nearest, to even */)

// One number, rounded to nearest, ties to even; inlined into each clone.
inline __attribute__((always_inline)) float read_bfloat16(const char* source) {
  uint16_t half;
  std::memcpy(&half, source, sizeof(half));
  const uint32_t bits = static_cast<uint32_t>(half) << 16U;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline __attribute__((always_inline)) void write_bfloat16(
    float value,
    char* result) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const auto half = static_cast<uint16_t>(TORCHKV_ROUND_BFLOAT16(bits) >> 16U);
  std::memcpy(result, &half, sizeof(half));
}

inline float read_half(const char* source) {
  c10::Half half;
  std::memcpy(&half, source, sizeof(half));
  return half;
}

inline void write_half(float value, char* result) {
  const c10::Half half(value);
  std::memcpy(result, &half, sizeof(half));
}

} // namespace torchkv::kernels::cpu

#pragma once

#include <cstdint>

#include "host_device.h"

namespace torchkv {

// The next number of the generator SplitMix64: numbers that differ in a bit
// become unrelated ones.
TORCHKV_HOST_DEVICE inline uint64_t mixed_bits(uint64_t bits) {
  bits += 0x9E3779B97F4A7C15U;
  bits = (bits ^ (bits >> 30U)) * 0xBF58476D1CE4E5B9U;
  bits = (bits ^ (bits >> 27U)) * 0x94D049BB133111EBU;
  return bits ^ (bits >> 31U);
}

} // namespace torchkv

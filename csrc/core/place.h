#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <tuple>

namespace torchkv {

// Where a slice is stored: a device, or one of several logical places on a
// device (memory/placement.h).
struct Place {
  c10::Device device = c10::kCPU;
  int32_t index = -1; // in TORCHKV_PLACES; -1 = the device itself

  friend bool operator==(const Place& a, const Place& b) {
    return a.device == b.device && a.index == b.index;
  }
  friend bool operator<(const Place& a, const Place& b) {
    const auto tuple = [](const Place& place) {
      return std::tuple(place.device.type(), place.device.index(), place.index);
    };
    return tuple(a) < tuple(b);
  }
  friend bool operator!=(const Place& a, const Place& b) {
    return !(a == b);
  }
};

} // namespace torchkv

#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../core/export.h"
#include "../core/place.h"
#include "parts.h"

namespace torchkv {

// The places over which stored values are sharded. By default these are the
// accelerators of a call's tensors.
//
// TORCHKV_PLACES="cuda:0,cuda:0,cuda:0,cuda:0" makes one device act as several,
// to test the store type "device": the n-th tensor of a list on a device is at
// its n-th place or, beyond that, at the last. Each place has its own stream
// (Streams). "cpu,cpu" works, too. Immutable.
class TORCHKV_API Places {
 public:
  // Parses TORCHKV_PLACES. ValueError unless it is a list of valid devices.
  explicit Places(const std::string& text = {});
  // The value of TORCHKV_PLACES, or an empty string.
  static std::string environment();

  // Whether one device acts as several.
  bool are_logical() const {
    return !listed_.empty();
  }

  // The distinct places of the tensors of an item; none if all are in CPU
  // memory.
  using List = c10::SmallVector<Place, 8>;
  List of(const Item& item) const;

 private:
  void add(c10::Device device, size_t nth, List& result) const;

  std::vector<Place> listed_;
};

} // namespace torchkv

#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../core/export.h"
#include "../core/place.h"
#include "item.h"

namespace torchkv {

// The places over which stored values are sharded. By default these are the
// accelerators of a call's tensors.
//
// TORCHKV_PLACES="cuda:0,cuda:0,cuda:0,cuda:0" lets one device stand for
// several, for tests of the store type "device": the first tensor of a list is
// at the first place of its device, the second at the second, and so on; those
// beyond the last place are at the last. Each place has a stream of its own
// (Streams). "cpu,cpu" works, too. Immutable.
class TORCHKV_API Places {
 public:
  // From the text of TORCHKV_PLACES. ValueError where it is no list of devices
  // that torch.device knows.
  explicit Places(const std::string& text = {});
  // TORCHKV_PLACES, or nothing.
  static std::string environment();

  // Whether one device stands for several.
  bool are_logical() const {
    return !listed_.empty();
  }

  // The distinct places of the tensors of an item; none where all are in CPU
  // memory.
  using List = c10::SmallVector<Place, 8>;
  List of(const Item& item) const;

 private:
  void add(c10::Device device, size_t nth, List& result) const;

  std::vector<Place> listed_;
};

} // namespace torchkv

#pragma once

#include "../memory/parts.h"

namespace torchkv {

// Communication between the devices or processes of a call, for the values that
// it supports; backends do the rest. REQUIRES: as Reducer.
class Collective {
 public:
  virtual ~Collective() = default;

  // Sums values on the home devices of their slices. Such a part is left with
  // the sum as its only value.
  virtual void reduce(Parts& parts) = 0;
  // Fills outs with the stored values. Such a part is left with the other outs.
  virtual void broadcast(Parts& parts) = 0;
};

} // namespace torchkv

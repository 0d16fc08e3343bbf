#pragma once

#include "../memory/parts.h"

namespace torchkv {

// Communication between the devices or processes of a call, for the values that
// it can carry; backends do the rest. REQUIRES: as Reducer.
class Collective {
 public:
  virtual ~Collective() = default;

  // Sums values at the homes of their slices: those parts are left with the sum
  // as their only value.
  virtual void reduce(Parts& parts) = 0;
  // Fills outs with the stored values: those parts are left with the other
  // outs.
  virtual void broadcast(Parts& parts) = 0;
};

} // namespace torchkv

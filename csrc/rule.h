#pragma once

#include <cstdint>

namespace torchkv {

// An elementwise updater as data: which formula and, with the first rule that
// has any, its numbers. Plain data on purpose, so that it can be copied per
// call (a changed learning rate takes effect at the next push), written to a
// file and sent to a server. Because a rule touches each element alone, Comm
// may run it in the pass that sums.
struct RuleSpec {
  enum class Id : uint16_t {
    kAssign = 0, // stored = sum of the values
  };

  Id id = Id::kAssign;
};

} // namespace torchkv

// A core and its driver, as far as a replay needs one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "replay_text.h"

namespace torchkv::dist::replay {

class ReplayedCore {
 public:
  virtual ~ReplayedCore() = default;
  // The lines of the actions that an event brings.
  virtual std::vector<std::string> replay(const std::string& event) = 0;
};

// Of the lines "core ..." and, perhaps, "restored ...".
std::unique_ptr<ReplayedCore> make_core(
    const std::string& core,
    const std::string& restored);

} // namespace torchkv::dist::replay

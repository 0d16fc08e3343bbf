#include "clock.h"

#include <algorithm>

namespace torchkv::mock_cuda {

uint64_t Clock::tick(Actor actor) {
  if (actor >= numbers_.size()) {
    numbers_.resize(actor + 1);
  }
  return ++numbers_[actor];
}

void Clock::join(const Clock& other) {
  numbers_.resize(std::max(numbers_.size(), other.numbers_.size()));
  for (size_t i = 0; i < other.numbers_.size(); ++i) {
    numbers_[i] = std::max(numbers_[i], other.numbers_[i]);
  }
}

bool Clock::covers(Actor actor, uint64_t number) const {
  return actor < numbers_.size() && numbers_[actor] >= number;
}

bool Clock::covers(const Clock& other) const {
  for (Actor actor = 0; actor < other.numbers_.size(); ++actor) {
    if (other.numbers_[actor] != 0 && !covers(actor, other.numbers_[actor])) {
      return false;
    }
  }
  return true;
}

std::string Work::text() const {
  return name + " on " + where;
}

} // namespace torchkv::mock_cuda

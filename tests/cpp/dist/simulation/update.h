#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dist/protocol/round.h"
#include "element.h"
#include "simulation.h"

// What the simulated driver does with a round.
namespace torchkv::dist::simulation {

inline int64_t rate_of(const Blob& options) {
  int64_t rate = 1;
  if (options.size() == sizeof(rate)) {
    std::memcpy(&rate, options.data(), sizeof(rate));
  }
  return rate;
}

// The part of a slice that is worked on in a half.
inline std::pair<int64_t, int64_t> range(int64_t count, int half) {
  const int64_t middle = count / 2;
  return half == 0 ? std::make_pair(int64_t{0}, middle)
                   : std::make_pair(middle, count);
}

using Pushed = std::vector<Blobs>; // pieces by push

// What the updater does with the round: the first rank's wish counts.
inline Poison poison_of(const Pushed& pushed) {
  for (const auto& pieces : pushed) {
    const Poison poison = element_at(pieces, 0).poison;
    if (poison != Poison::kNone) {
      return poison;
    }
  }
  return Poison::kNone;
}

// The work of one round.
class Update {
 public:
  // `target`: shared memory to write to, or null.
  Update(RoundPtr round, Segment* target)
      : round_(std::move(round)), target_(target) {}

  // Chooses the memory to write to.
  void begin();

  void work(int half, const Pushed& pushed) {
    const Round& round = *round_;
    if (half == 0) {
      poison_ = poison_of(pushed);
    }
    const bool writes = poison_ == Poison::kNone || poison_ == Poison::kAfter ||
        (poison_ == Poison::kHalf && half == 0);
    if (round.factor == 0 || !writes) {
      return;
    }
    const int64_t rate = rate_of(round.options);
    const auto factor = static_cast<int64_t>(round.factor);
    const auto [begin, end] = range(round.num_elements, half);
    for (int64_t i = begin; i < end; ++i) {
      for (const auto& pieces : pushed) {
        add(elements_->at(static_cast<size_t>(i)),
            element_at(pieces, i),
            rate,
            factor);
      }
    }
  }

  std::optional<std::string> error() const {
    if (round_->factor == 0 || poison_ == Poison::kNone) {
      return std::nullopt;
    }
    return text_of(poison_);
  }

 private:
  void begin_in(Segment& segment) {
    Round& round = *round_;
    for (const auto& shot : round.shots) {
      shot->value = std::make_shared<OwnValue>(gather(round.target->pieces));
    }
    // Before the first byte changes.
    segment.kid = round.kid;
    segment.version = round.version;
    if (round.target != round.source) {
      // Into the same memory, to which others refer.
      const Elements from = gather(round.source->pieces);
      std::copy(from.begin(), from.end(), segment.memory.begin());
    }
    round.result = round.target;
    elements_ = &segment.memory;
  }

  const RoundPtr round_;
  Segment* const target_;
  Elements* elements_ = nullptr;
  Poison poison_ = Poison::kNone;
};

} // namespace torchkv::dist::simulation

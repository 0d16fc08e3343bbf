#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "clock.h"

namespace torchkv::mock_cuda {

using WorkPtr = std::shared_ptr<const Work>;

// The last accesses of each byte: the last write, and the reads since then.
class History {
 public:
  // Adds an access to [begin, end) by `work`, whose actor knows `clock`. Throws
  // c10::Error, naming both, if it conflicts with an access that the clock does
  // not cover.
  void access(
      uintptr_t begin,
      uintptr_t end,
      bool is_write,
      const WorkPtr& work,
      const Clock& clock);

  // An access that `clock` does not cover; null if there is none.
  WorkPtr uncovered(const Clock& clock) const;

 private:
  struct Cell {
    uintptr_t end;
    WorkPtr write;
    std::vector<WorkPtr> reads; // the last one of each actor
  };

  // Splits a cell that contains `at`.
  void split(uintptr_t at);

  std::map<uintptr_t, Cell> cells_; // by first byte; disjoint
};

} // namespace torchkv::mock_cuda

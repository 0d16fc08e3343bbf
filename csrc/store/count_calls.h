#pragma once

#include <c10/util/ArrayRef.h>

#include <chrono>

#include "../memory/entry.h"
#include "../memory/key_stats.h"
#include "../memory/parts.h"
#include "arguments.h"
#include "batch.h"

namespace torchkv {

class Stopwatch {
 public:
  double seconds() const {
    const std::chrono::duration<double> taken = Clock::now() - begin_;
    return taken.count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin_ = Clock::now();
};

// Add a time to the items' stats, and a push or a pull of their tensors.
// REQUIRES: the entries' mutexes.
void add_seconds(
    c10::ArrayRef<Item> items,
    double KeyStats::* member,
    double seconds);
void count_push(const Batch& batch, double KeyStats::* member, double seconds);
void count_pull(c10::ArrayRef<Item> items, double seconds);

// Adds a pull of rows. REQUIRES: the entry's mutex.
void count_rows(Entry& entry, const at::Tensor& rows, double seconds);

// Counts a call without its times. `are_usual`: as check_values() and
// check_outs() say. REQUIRES: the thread holds no entry's mutex.
void count_call(const Call& call, const Entries& entries, bool are_usual);

} // namespace torchkv

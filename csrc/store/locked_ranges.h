#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <utility>

#include "batch.h"

namespace torchkv {

// Calls `body(begin, end)` for ranges of entries, in order, while it holds
// their mutexes. It waits for a mutex only while it holds none: a range ends
// before an entry that another call holds, and the next one begins by waiting
// for it.
template <class Body>
void for_each_locked(const Groups& groups, Body body) {
  // Large enough for a parallel region, small enough not to block others long.
  constexpr size_t kMaxEntries = 4096;
  constexpr int64_t kMaxBytes = int64_t{256} * 1024 * 1024;

  const Entries& entries = groups.entries();
  // The bytes that a sum or a copy of one key moves while its caller blocks:
  // none on accelerators, where work is enqueued, and larger ranges take fewer
  // launches and waits. REQUIRES: the entry's mutex.
  const auto num_bytes = [&](size_t i) -> int64_t {
    if (!entries[i]->device.is_cpu()) {
      return 0;
    }
    const auto tensors = groups.tensors().of(static_cast<int64_t>(i));
    const auto num_tensors = static_cast<int64_t>(tensors.size() + 1);
    return entries[i]->meta.num_bytes() * num_tensors;
  };
  c10::SmallVector<std::unique_lock<std::mutex>, 1> locks;
  locks.reserve(std::min(entries.size(), kMaxEntries));
  for (size_t begin = 0; begin < entries.size();) {
    locks.emplace_back(entries[begin]->mutex);
    int64_t bytes = num_bytes(begin);
    size_t end = begin + 1;
    while (end < entries.size() && end - begin < kMaxEntries &&
           bytes < kMaxBytes) {
      std::unique_lock lock(entries[end]->mutex, std::try_to_lock);
      if (!lock.owns_lock()) {
        break;
      }
      locks.push_back(std::move(lock));
      bytes += num_bytes(end++);
    }
    body(begin, end);
    locks.clear();
    begin = end;
  }
}

} // namespace torchkv

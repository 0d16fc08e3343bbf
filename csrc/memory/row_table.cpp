#include "row_table.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <random>

#include "../kernels/cpu/parallel.h"

namespace torchkv {

uint64_t RowTable::Hash::seed() {
  static const uint64_t seed = [] {
    std::random_device random;
    return (uint64_t{random()} << 32U) | random();
  }();
  return seed;
}

std::vector<int64_t> RowTable::slots_by_id() const {
  std::vector<int64_t> slots(ids_.size());
  std::iota(slots.begin(), slots.end(), int64_t{0});
  if (!std::is_sorted(ids_.begin(), ids_.end())) {
    std::sort(slots.begin(), slots.end(), [this](int64_t a, int64_t b) {
      return ids_[static_cast<size_t>(a)] < ids_[static_cast<size_t>(b)];
    });
  }
  return slots;
}

const RowTable::Place* RowTable::first_place() const {
  if (ids_.empty()) {
    return nullptr;
  }
  // The map does not say where its memory begins, only where an id is.
  const Place* const any = slot_of_.find(ids_[0]).current;
  return any - any->distance_from_desired - slot_of_.bucket(ids_[0]);
}

void RowTable::find(const int64_t* ids, int64_t count, int64_t* slots) const {
  constexpr int64_t kBytes = 64; // of memory that an id costs: a cache line
  constexpr int64_t kAhead = 16; // ids
  const auto* const first = first_place();
  kernels::cpu::parallel_spans(
      1,
      [&](int64_t /*job*/) { return kernels::cpu::Work{count, kBytes, 64}; },
      [&](int64_t /*job*/, int64_t begin, int64_t end, bool /*stream*/) {
        for (int64_t i = begin; i < end; ++i) {
          if (first != nullptr && i + kAhead < end) {
            __builtin_prefetch(first + slot_of_.bucket(ids[i + kAhead]));
          }
          const auto it = slot_of_.find(ids[i]);
          slots[i] = it == slot_of_.end() ? -1 : it->second;
        }
      });
}

void RowTable::reserve(int64_t num_rows) {
  slot_of_.reserve(static_cast<size_t>(num_rows));
  ids_.reserve(static_cast<size_t>(num_rows));
}

void RowTable::add(const int64_t* ids, int64_t count, int64_t* slots) {
  const int64_t before = size();
  try {
    for (int64_t i = 0; i < count; ++i) {
      if (slots[i] < 0) {
        if (ids_.size() == ids_.capacity()) {
          ids_.reserve(
              ids_.size() * 2 + 1); // now, so that push_back cannot fail
        }
        const auto [it, is_new] = slot_of_.emplace(ids[i], size());
        slots[i] = it->second;
        if (is_new) {
          ids_.push_back(ids[i]);
        }
      }
    }
  } catch (...) {
    truncate(before);
    throw;
  }
}

void RowTable::truncate(int64_t size) {
  for (; this->size() > size; ids_.pop_back()) {
    slot_of_.erase(ids_.back());
  }
}

RowTable::Moves RowTable::remove(const int64_t* ids, int64_t count) {
  Moves moves;
  for (int64_t i = 0; i < count; ++i) {
    const auto it = slot_of_.find(ids[i]);
    if (it == slot_of_.end()) {
      continue;
    }
    const int64_t slot = it->second;
    const int64_t last = size() - 1;
    slot_of_.erase(it);
    if (slot != last) {
      const int64_t moved = ids_.back();
      ids_[static_cast<size_t>(slot)] = moved;
      slot_of_[moved] = slot;
      moves.from.push_back(last);
      moves.to.push_back(slot);
    }
    ids_.pop_back();
  }
  free_unused();
  return moves;
}

void RowTable::free_unused() {
  constexpr size_t kLeast = 1024; // rows
  if (ids_.capacity() > std::max(kLeast, 4 * ids_.size())) {
    try {
      ids_.shrink_to_fit();
      slot_of_.shrink_to_fit();
    } catch (const std::bad_alloc&) { // of the smaller memory
      return;
    }
  }
}

} // namespace torchkv

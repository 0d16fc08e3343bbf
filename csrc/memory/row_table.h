#pragma once

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/export.h"
#include "../core/huge_pages.h"
#include "../core/mixed_bits.h"
#include "../core/row_init.h"

namespace torchkv {

// Which rows a row-sparse value has: they are numbered from 0 without gaps, in
// the order of the memory (slots).
class TORCHKV_API RowTable {
 public:
  explicit RowTable(RowInit init) : init(init) {}

  const RowInit init; // of rows that it does not have
  std::atomic<int64_t> num_bytes{0}; // of the value

  int64_t size() const {
    return static_cast<int64_t>(ids_.size());
  }
  // Of each slot.
  const std::vector<int64_t>& ids() const {
    return ids_;
  }
  // All slots, in ascending order of their ids.
  std::vector<int64_t> slots_by_id() const;

  // slots[i] = that of the row ids[i], or -1.
  void find(const int64_t* ids, int64_t count, int64_t* slots) const;
  // Memory for so many rows, before many are added.
  void reserve(int64_t num_rows);
  // After find(): gives rows whose slot is -1 the next ones, in the order in
  // which they first appear. An exception has changed nothing.
  void add(const int64_t* ids, int64_t count, int64_t* slots);
  // Keeps the first `size` rows.
  void truncate(int64_t size);
  // Rows move to close the gaps: in this order, from[i] to to[i].
  struct Moves {
    std::vector<int64_t> from;
    std::vector<int64_t> to;
  };
  // Ids that it does not have are skipped.
  Moves remove(const int64_t* ids, int64_t count);

 private:
  void free_unused();

  // Ids may be of any pattern, or chosen by others: some that shared their
  // first places would make the table grow without end.
  struct Hash {
    TORCHKV_API static uint64_t seed(); // of the process

    size_t operator()(int64_t id) const {
      return mixed_bits(static_cast<uint64_t>(id) ^ own);
    }
    uint64_t own = seed();
  };
  using Map = ska::flat_hash_map<
      int64_t,
      int64_t,
      Hash,
      std::equal_to<>,
      HugePageAllocator<std::pair<int64_t, int64_t>>>;
  using Place = std::remove_pointer_t<decltype(Map::iterator::current)>;

  // Of the map's memory, for prefetching; null without rows.
  const Place* first_place() const;

  Map slot_of_;
  std::vector<int64_t> ids_;
};

} // namespace torchkv

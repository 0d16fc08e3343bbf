#include "row_ids.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <tuple>
#include <utility>
#include <vector>

#include "clones.h"
#include "parallel.h"

namespace torchkv::kernels::cpu {
namespace {

struct IndexedId {
  uint64_t id;
  int64_t index;
};

// Digits of a radix sort: their counts are in the first-level cache.
constexpr uint32_t kDigitBits = 11;
constexpr size_t kDigits = size_t{1} << kDigitBits;

// A pass of a radix sort, by the digit at `shift`.
void sort_by_digit(
    const std::vector<IndexedId>& from,
    std::vector<IndexedId>& to,
    uint32_t shift) {
  const auto digit_of = [shift](const IndexedId& item) {
    return static_cast<size_t>(item.id >> shift) % kDigits;
  };
  std::array<size_t, kDigits> begins{};
  for (const auto& item : from) {
    ++begins[digit_of(item)];
  }
  size_t begin = 0;
  for (auto& count : begins) {
    begin += std::exchange(count, begin);
  }
  for (const auto& item : from) {
    to[begins[digit_of(item)]++] = item;
  }
}

constexpr int64_t kIdBlock = 1024; // in the first-level cache

struct IdsInBlock {
  uint64_t largest; // huge if an id is negative
  bool descends;
  bool repeats;
};

// Of a block, and its first id's predecessor if it has one. Without branches,
// so that the compiler vectorizes it.
TORCHKV_CLONES IdsInBlock
ids_in_block(const int64_t* ids, int64_t size, bool has_predecessor) {
  uint64_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    const auto id = static_cast<uint64_t>(ids[i]);
    largest = largest < id ? id : largest;
  }
  uint64_t descents = 0;
  uint64_t repeats = 0;
  for (int64_t i = has_predecessor ? 0 : 1; i < size; ++i) {
    descents += static_cast<uint64_t>(ids[i] < ids[i - 1]);
    repeats += static_cast<uint64_t>(ids[i] == ids[i - 1]);
  }
  return {largest, descents != 0, repeats != 0};
}

} // namespace

RowIdsFound inspect_row_ids(
    const int64_t* ids,
    int64_t num_ids,
    int64_t num_rows) {
  const auto limit = static_cast<uint64_t>(num_rows);
  std::atomic<bool> is_good{true};
  std::atomic<bool> is_ascending{true};
  std::atomic<bool> is_distinct{true};
  parallel_spans(
      1,
      [&](int64_t /*job*/) { return Work{num_ids, sizeof(int64_t)}; },
      [&](int64_t /*job*/, int64_t begin, int64_t end, bool /*stream*/) {
        for (int64_t i = begin; i < end; i += kIdBlock) {
          const int64_t size = std::min(kIdBlock, end - i);
          const IdsInBlock block = ids_in_block(ids + i, size, i != 0);
          if (block.largest >= limit) {
            is_good = false;
          }
          if (block.descends) {
            is_ascending = false;
          }
          if (block.repeats) {
            is_distinct = false;
          }
        }
      });
  RowIdsFound found{-1, is_ascending, is_distinct};
  if (!is_good) {
    found.first_bad = std::find_if(
                          ids,
                          ids + num_ids,
                          [limit](int64_t id) {
                            return static_cast<uint64_t>(id) >= limit;
                          }) -
        ids;
  }
  return found;
}

void sort_row_ids(
    const int64_t* ids,
    int64_t num_ids,
    int64_t num_rows,
    int64_t* sorted,
    int64_t* order) {
  const auto count = static_cast<size_t>(num_ids);
  std::vector<IndexedId> items(count);
  for (size_t i = 0; i < count; ++i) {
    items[i] = {static_cast<uint64_t>(ids[i]), static_cast<int64_t>(i)};
  }
  if (count < kDigits) {
    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
      return std::tie(a.id, a.index) < std::tie(b.id, b.index);
    });
  } else {
    std::vector<IndexedId> next(count);
    for (uint32_t shift = 0;
         shift < 64 && (static_cast<uint64_t>(num_rows) >> shift) != 0;
         shift += kDigitBits) {
      sort_by_digit(items, next, shift);
      items.swap(next);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    sorted[i] = static_cast<int64_t>(items[i].id);
    order[i] = items[i].index;
  }
}

} // namespace torchkv::kernels::cpu

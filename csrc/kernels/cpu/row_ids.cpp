#include "row_ids.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "clones.h"
#include "parallel.h"

namespace torchkv::kernels::cpu {
namespace {

// Ids with the index that each had: in one number, where both fit into half of
// it.
using PackedId = uint64_t;
struct IndexedId {
  uint64_t id;
  int64_t index;
};
constexpr uint32_t kHalf = 32; // bits

PackedId make_item(uint64_t id, int64_t index, PackedId /*type*/) {
  return (id << kHalf) | static_cast<uint64_t>(index);
}
IndexedId make_item(uint64_t id, int64_t index, IndexedId /*type*/) {
  return {id, index};
}
uint64_t id_of(PackedId item) {
  return item >> kHalf;
}
uint64_t id_of(const IndexedId& item) {
  return item.id;
}
int64_t index_of(PackedId item) {
  return static_cast<int64_t>(item & ((uint64_t{1} << kHalf) - 1));
}
int64_t index_of(const IndexedId& item) {
  return item.index;
}

// Digits of a radix sort: their counts are in the first-level cache.
constexpr uint32_t kMostDigitBits = 12;
constexpr size_t kFewestForDigits = 256; // ids

// A pass of a radix sort, by the digit at `shift`.
template <class Item>
void sort_by_digit(
    const std::vector<Item>& from,
    std::vector<Item>& to,
    uint32_t shift,
    uint32_t digit_bits) {
  using Count =
      std::conditional_t<std::is_same_v<Item, PackedId>, uint32_t, size_t>;
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  const auto digit_of = [shift, mask](const Item& item) {
    return static_cast<size_t>((id_of(item) >> shift) & mask);
  };
  std::array<Count, size_t{1} << kMostDigitBits> begins{};
  for (const auto& item : from) {
    ++begins[digit_of(item)];
  }
  Count begin = 0;
  for (auto& count : begins) {
    begin += std::exchange(count, begin);
  }
  for (const auto& item : from) {
    to[begins[digit_of(item)]++] = item;
  }
}

template <class Item>
void sort_as(
    const int64_t* ids,
    int64_t num_ids,
    uint32_t num_bits, // of an id
    int64_t* sorted,
    int64_t* order) {
  const auto count = static_cast<size_t>(num_ids);
  std::vector<Item> items(count);
  for (size_t i = 0; i < count; ++i) {
    items[i] = make_item(
        static_cast<uint64_t>(ids[i]), static_cast<int64_t>(i), Item());
  }
  if (count < kFewestForDigits) {
    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
      return std::pair(id_of(a), index_of(a)) <
          std::pair(id_of(b), index_of(b));
    });
  } else if (num_bits != 0) {
    const uint32_t num_digits =
        (num_bits + kMostDigitBits - 1) / kMostDigitBits;
    const uint32_t digit_bits = (num_bits + num_digits - 1) / num_digits;
    std::vector<Item> next(count);
    for (uint32_t shift = 0; shift < num_bits; shift += digit_bits) {
      sort_by_digit(items, next, shift, digit_bits);
      items.swap(next);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    sorted[i] = static_cast<int64_t>(id_of(items[i]));
    order[i] = index_of(items[i]);
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
  uint32_t num_bits = 0; // of the largest id
  for (auto id = static_cast<uint64_t>(num_rows) - 1; id != 0; id >>= 1U) {
    ++num_bits;
  }
  constexpr int64_t kMostPacked{std::numeric_limits<uint32_t>::max()};
  if (num_bits <= kHalf && num_ids <= kMostPacked) {
    sort_as<PackedId>(ids, num_ids, num_bits, sorted, order);
  } else {
    sort_as<IndexedId>(ids, num_ids, num_bits, sorted, order);
  }
}

} // namespace torchkv::kernels::cpu

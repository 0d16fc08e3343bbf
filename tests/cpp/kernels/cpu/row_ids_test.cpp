// Row ids: the first that is bad, their order, and the stable sort.
#include "kernels/cpu/row_ids.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace torchkv {
namespace {

using kernels::cpu::inspect_row_ids;
using kernels::cpu::RowIdsFound;
using kernels::cpu::sort_row_ids;

RowIdsFound inspect(const std::vector<int64_t>& ids, int64_t num_rows) {
  return inspect_row_ids(
      ids.data(), static_cast<int64_t>(ids.size()), num_rows);
}

TEST(RowIdsTest, FindsTheirOrder) {
  struct Case {
    std::vector<int64_t> ids;
    bool is_ascending;
    bool is_distinct;
  };
  for (const auto& [ids, is_ascending, is_distinct] : std::vector<Case>{
           {{}, true, true},
           {{9}, true, true},
           {{0, 1, 9}, true, true},
           {{0, 1, 1, 9}, true, false},
           {{1, 0, 9}, false, true}}) {
    const RowIdsFound found = inspect(ids, 10);
    EXPECT_EQ(found.first_bad, -1);
    EXPECT_EQ(found.is_ascending, is_ascending);
    EXPECT_EQ(found.is_distinct, is_distinct);
  }
}

// Enough for several blocks and threads; the order may break between any two.
TEST(RowIdsTest, LooksAtAllIds) {
  constexpr int64_t kCount = 100'000;
  std::vector<int64_t> ids(kCount);
  std::iota(ids.begin(), ids.end(), 0);
  EXPECT_TRUE(inspect(ids, kCount).is_distinct);
  for (const size_t at :
       {size_t{1}, size_t{1024}, size_t{2047}, ids.size() - 1}) {
    const int64_t id = ids[at];
    ids[at] = id - 1;
    EXPECT_TRUE(inspect(ids, kCount).is_ascending) << at;
    EXPECT_FALSE(inspect(ids, kCount).is_distinct) << at;
    ids[at] = 0;
    EXPECT_EQ(inspect(ids, kCount).is_ascending, at == 1) << at;
    for (const int64_t bad :
         {kCount, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
      ids[at] = bad;
      EXPECT_EQ(inspect(ids, kCount).first_bad, static_cast<int64_t>(at));
    }
    ids[at] = id;
  }
  ids[70'000] = ids[30'000] = -1;
  EXPECT_EQ(inspect(ids, kCount).first_bad, 30'000);
}

TEST(RowIdsTest, SortsStably) {
  std::mt19937 random(1); // NOLINT(bugprone-random-generator-seed): repeatable
  for (const size_t count : {0U, 1U, 2U, 255U, 256U, 30'000U}) {
    for (const int64_t num_rows :
         {int64_t{1},
          int64_t{50},
          int64_t{4096},
          int64_t{4097},
          int64_t{1} << 32U,
          (int64_t{1} << 32U) + 1,
          std::numeric_limits<int64_t>::max()}) {
      std::uniform_int_distribution<int64_t> any(0, num_rows - 1);
      std::vector<int64_t> ids(count);
      std::generate(ids.begin(), ids.end(), [&] { return any(random); });
      if (count > 1) {
        ids[1] = num_rows - 1;
      }
      std::vector<int64_t> expected(count);
      std::iota(expected.begin(), expected.end(), 0);
      std::stable_sort(
          expected.begin(), expected.end(), [&](int64_t a, int64_t b) {
            return ids[a] < ids[b];
          });
      std::vector<int64_t> sorted(count);
      std::vector<int64_t> order(count);
      sort_row_ids(
          ids.data(),
          static_cast<int64_t>(count),
          num_rows,
          sorted.data(),
          order.data());
      EXPECT_EQ(order, expected);
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(sorted[i], ids[expected[i]]);
      }
    }
  }
}

} // namespace
} // namespace torchkv

#include "memory/merged_ids.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <random>
#include <vector>

namespace torchkv {
namespace {

constexpr int64_t kMaxId = std::numeric_limits<int64_t>::max();

IdsOfKey ids_of(
    int64_t num_rows,
    const std::vector<std::vector<int64_t>>& values) {
  IdsOfKey result;
  result.num_rows = num_rows;
  for (const auto& value : values) {
    result.values.push_back(at::tensor(value, at::kLong));
  }
  return result;
}

std::vector<int64_t> numbers_of(const at::Tensor& tensor) {
  EXPECT_EQ(tensor.scalar_type(), at::kLong);
  EXPECT_TRUE(tensor.is_contiguous());
  const auto* const first = tensor.const_data_ptr<int64_t>();
  return {first, first + tensor.numel()};
}

// Which of the values' rows each id has, in order.
using Rows = std::map<int64_t, std::vector<int64_t>>;

Rows rows_of(const MergedIds& merged) {
  const auto ids = numbers_of(merged.ids);
  const auto offsets = numbers_of(merged.offsets);
  const auto order = numbers_of(merged.order);
  EXPECT_EQ(offsets.size(), ids.size() + 1);
  EXPECT_EQ(offsets.front(), 0);
  EXPECT_EQ(offsets.back(), static_cast<int64_t>(order.size()));
  EXPECT_TRUE(std::is_sorted(ids.begin(), ids.end()));
  Rows rows;
  for (size_t i = 0; i < ids.size(); ++i) {
    rows[ids[i]].assign(
        order.begin() + offsets[i], order.begin() + offsets[i + 1]);
  }
  EXPECT_EQ(rows.size(), ids.size()); // they are distinct
  return rows;
}

Rows rows_of(const IdsOfKey& key) {
  Rows rows;
  int64_t number = 0;
  for (const auto& value : key.values) {
    for (const int64_t id : numbers_of(value)) {
      rows[id].push_back(number++);
    }
  }
  return rows;
}

void check(const std::vector<IdsOfKey>& keys) {
  const auto merged = merge_ids(keys);
  ASSERT_EQ(merged.size(), keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(rows_of(merged[i]), rows_of(keys[i])) << i;
  }
}

TEST(MergedIdsTest, RowsOfOneIdStayInTheOrderOfTheValues) {
  check({ids_of(10, {{7, 3, 7}, {3}, {9, 0, 7}})});
}

TEST(MergedIdsTest, KeysAreMergedApart) {
  check({ids_of(10, {{7, 3}, {3}}), ids_of(4, {{3}}), ids_of(8, {{7, 0, 3}})});
}

TEST(MergedIdsTest, RandomKeys) {
  std::mt19937 random(1); // NOLINT(bugprone-random-generator-seed)
  const auto below = [&](int64_t limit) {
    return std::uniform_int_distribution<int64_t>(0, limit - 1)(random);
  };
  for (int i = 0; i < 200; ++i) {
    std::vector<IdsOfKey> keys(static_cast<size_t>(1 + below(5)));
    for (auto& key : keys) {
      key.num_rows = below(4) == 0 ? (int64_t{1} << 40) : 1 + below(30);
      for (int64_t value = 1 + below(4); value != 0; --value) {
        at::Tensor& ids =
            key.values.emplace_back(at::empty({1 + below(20)}, at::kLong));
        for (int64_t j = 0; j < ids.numel(); ++j) {
          ids.mutable_data_ptr<int64_t>()[j] = below(key.num_rows);
        }
      }
    }
    check(keys);
  }
}

TEST(MergedIdsTest, IdsThatAreNoRowsOfTheirKey) {
  for (const int64_t bad :
       {int64_t{-1},
        int64_t{10},
        int64_t{12},
        (int64_t{1} << 32) + 5,
        kMaxId,
        -kMaxId - 1}) {
    EXPECT_TRUE(merge_ids(ids_of(10, {{5, bad}})).empty()) << bad;
    // Also where its number is that of a row of another key.
    for (const int64_t num_rows : {int64_t{20}, int64_t{1} << 40}) {
      const IdsOfKey good = ids_of(num_rows, {{5}, {0, 19}});
      const IdsOfKey with_bad = ids_of(10, {{5}, {bad, 2}});
      EXPECT_TRUE(merge_ids({good, with_bad}).empty()) << bad;
      EXPECT_TRUE(merge_ids({with_bad, good}).empty()) << bad;
      EXPECT_TRUE(merge_ids({good, with_bad, good}).empty()) << bad;
      check({good, good});
    }
  }
  // Those of two keys that would make up for each other.
  EXPECT_TRUE(merge_ids({ids_of(10, {{12}}), ids_of(10, {{-7}})}).empty());
}

TEST(MergedIdsTest, KeysOfTheMostRows) {
  check({ids_of(kMaxId, {{kMaxId - 1, 0}})});
  check(
      {ids_of(kMaxMergedRows - 1, {{kMaxMergedRows - 2}}),
       ids_of(1, {{0, 0}})});
}

} // namespace
} // namespace torchkv

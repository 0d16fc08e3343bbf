// The index of a row-sparse value, against a map.
#include "memory/row_table.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>
#include <vector>

namespace torchkv {
namespace {

std::vector<int64_t> find(const RowTable& table, std::vector<int64_t> ids) {
  std::vector<int64_t> slots(ids.size());
  table.find(ids.data(), static_cast<int64_t>(ids.size()), slots.data());
  return slots;
}

std::vector<int64_t> add(RowTable& table, const std::vector<int64_t>& ids) {
  std::vector<int64_t> slots = find(table, ids);
  table.add(ids.data(), static_cast<int64_t>(ids.size()), slots.data());
  return slots;
}

TEST(RowTableTest, RowsAreNumberedAsTheyFirstAppear) {
  RowTable table{RowInit()};
  EXPECT_EQ(add(table, {9, 2, 9, 5}), (std::vector<int64_t>{0, 1, 0, 2}));
  EXPECT_EQ(add(table, {5, 7}), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(find(table, {7, 1, 9}), (std::vector<int64_t>{3, -1, 0}));
  EXPECT_EQ(table.ids(), (std::vector<int64_t>{9, 2, 5, 7}));
  EXPECT_EQ(table.slots_by_id(), (std::vector<int64_t>{1, 2, 3, 0}));
}

TEST(RowTableTest, TruncateForgetsTheRowsAddedLast) {
  RowTable table{RowInit()};
  add(table, {4, 8});
  add(table, {7, 4, 7, 1});
  table.truncate(2);
  EXPECT_EQ(table.ids(), (std::vector<int64_t>{4, 8}));
  EXPECT_EQ(find(table, {7, 8, 1, 4}), (std::vector<int64_t>{-1, 1, -1, 0}));
  EXPECT_EQ(add(table, {1}), (std::vector<int64_t>{2}));
}

TEST(RowTableTest, TheLastRowsTakeThePlacesOfRemovedOnes) {
  RowTable table{RowInit()};
  add(table, {10, 11, 12, 13});
  const std::vector<int64_t> gone{11, 99, 13, 11, 10};
  const auto moves = table.remove(gone.data(), 5);
  EXPECT_EQ(moves.from, (std::vector<int64_t>{3, 2, 1}));
  EXPECT_EQ(moves.to, (std::vector<int64_t>{1, 1, 0}));
  EXPECT_EQ(table.ids(), (std::vector<int64_t>{12}));
  EXPECT_EQ(find(table, {12, 10, 13}), (std::vector<int64_t>{0, -1, -1}));
}

// Tables of c10 place numbers by their product with this constant: these would
// all be first in one place, and the table would grow until memory ends.
TEST(RowTableTest, IdsThatCollideTakeNoMoreMemory) {
  uint64_t inverse = 1; // of the constant, modulo 2^64
  for (int i = 0; i < 6; ++i) {
    inverse *= 2 - 11400714819323198485U * inverse;
  }
  std::vector<int64_t> ids;
  for (uint64_t i = 1; ids.size() < 64; ++i) {
    const uint64_t id = i * inverse;
    if (id < uint64_t{1} << 60U) {
      ids.push_back(static_cast<int64_t>(id));
    }
  }
  RowTable table{RowInit()};
  add(table, ids);
  EXPECT_EQ(table.size(), 64);
  EXPECT_EQ(find(table, ids), add(table, ids));
}

TEST(RowTableTest, RemovedRowsFreeTheirMemory) {
  RowTable table{RowInit()};
  std::vector<int64_t> ids(100'000);
  std::iota(ids.begin(), ids.end(), 0);
  add(table, ids);
  table.remove(ids.data(), 99'990);
  EXPECT_EQ(table.size(), 10);
  EXPECT_LE(table.ids().capacity(), 1024U);
  EXPECT_EQ(find(table, {0, 99'995}).at(0), -1);
  EXPECT_EQ(add(table, {0}).at(0), 10);
}

TEST(RowTableTest, RandomOperations) {
  std::mt19937_64 random(1);
  RowTable table{RowInit()};
  std::map<int64_t, int64_t> rows; // the content that each slot has, by id
  std::vector<int64_t> memory; // by slot
  for (int step = 0; step < 500; ++step) {
    std::vector<int64_t> ids(random() % 40);
    for (auto& id : ids) {
      // Some of them far apart.
      id = static_cast<int64_t>(random() % 60) *
          (int64_t{1} << (random() % 8 * 7));
    }
    const auto count = static_cast<int64_t>(ids.size());
    if (random() % 3 != 0) {
      for (const int64_t slot : add(table, ids)) {
        memory.resize(static_cast<size_t>(table.size()), -1);
        auto& content = memory[static_cast<size_t>(slot)];
        const int64_t id = table.ids()[static_cast<size_t>(slot)];
        EXPECT_EQ(content == -1, rows.count(id) == 0);
        content = id;
        rows[id] = id;
      }
    } else {
      const auto moves = table.remove(ids.data(), count);
      for (size_t i = 0; i < moves.from.size(); ++i) {
        memory[static_cast<size_t>(moves.to[i])] =
            memory[static_cast<size_t>(moves.from[i])];
      }
      memory.resize(static_cast<size_t>(table.size()));
      for (const int64_t id : ids) {
        rows.erase(id);
      }
    }
    ASSERT_EQ(table.size(), static_cast<int64_t>(rows.size()));
    ASSERT_EQ(table.ids(), memory);
    std::vector<int64_t> in_order;
    for (const int64_t slot : table.slots_by_id()) {
      in_order.push_back(table.ids()[static_cast<size_t>(slot)]);
    }
    std::vector<int64_t> expected;
    for (const auto& [id, content] : rows) {
      expected.push_back(id);
    }
    ASSERT_EQ(in_order, expected);
  }
}

} // namespace
} // namespace torchkv

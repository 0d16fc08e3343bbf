// Slices: their names and order, and where they are.
#include "dist/protocol/slice.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dist/protocol/message.h"

namespace torchkv::dist {
namespace {

KeySpec spec_of(int64_t total, bool whole = false) {
  KeySpec spec;
  spec.total = total;
  spec.item_bytes = 4;
  spec.whole = whole;
  return spec;
}

TEST(SliceTest, IntKeysComeBeforeStrKeys) {
  const std::vector<SliceId> sorted = {
      {-1, 0}, {3, -1}, {3, 0}, {3, 1}, {20, 0}, {"", 0}, {"10", 0}, {"9", 0}};
  for (size_t i = 0; i < sorted.size(); ++i) {
    for (size_t j = 0; j < sorted.size(); ++j) {
      EXPECT_EQ(sorted[i] < sorted[j], i < j) << i << ' ' << j;
      EXPECT_EQ(sorted[i] == sorted[j], i == j) << i << ' ' << j;
    }
  }
}

TEST(SliceTest, Text) {
  EXPECT_EQ((SliceId{"conv1.weight", 2}).text(), "conv1.weight/2");
  EXPECT_EQ((SliceId{-3, 0}).text(), "-3/0");
  EXPECT_EQ(SliceId().text(), "");
}

// Fixed for ever: another hash would move the keys of stored snapshots.
TEST(SliceTest, HashIsFnv1a) {
  EXPECT_EQ(stable_hash(""), 0xcbf29ce484222325U);
  EXPECT_EQ(stable_hash("a"), 0xaf63dc4c8601ec8cU);
  EXPECT_EQ(stable_hash("foobar"), 0x85944171f73967e8U);
  // The bytes 01 00 .. 00, and a text that has them.
  EXPECT_EQ(stable_hash(1), stable_hash(std::string("\1\0\0\0\0\0\0\0", 8)));
  EXPECT_NE(stable_hash(1), stable_hash("1"));
}

TEST(SliceTest, SmallAndWholeKeysHaveOneSlice) {
  for (const auto& spec :
       {spec_of(0), spec_of(16383), spec_of(1 << 20, true)}) {
    const auto places = place("w", spec, 4, 1 << 16);
    ASSERT_EQ(places.size(), 1);
    EXPECT_EQ(places[0].begin, 0);
    EXPECT_EQ(places[0].end, spec.total);
    EXPECT_EQ(places[0].server, stable_hash("w") % 4);
  }
  EXPECT_EQ(place("w", spec_of(16384), 4, 1 << 16).size(), 4);
}

TEST(SliceTest, SlicesAreEvenAndAligned) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    const auto servers = static_cast<int32_t>(1 + (random() % 9));
    const auto total = static_cast<int64_t>(random() % 5000);
    const Key key = static_cast<int64_t>(random());
    const auto places = place(key, spec_of(total), servers, 64);
    const auto parts = static_cast<int64_t>(places.size());
    EXPECT_EQ(parts == 1, total < 16 || servers == 1) << total;
    int64_t end = 0;
    std::set<int32_t> used;
    for (size_t j = 0; j < places.size(); ++j) {
      const auto& each = places[j];
      EXPECT_EQ(each.index, static_cast<int32_t>(j));
      EXPECT_EQ(each.begin, end);
      end = each.end;
      EXPECT_TRUE(used.insert(each.server).second);
      if (total / parts >= 16) {
        EXPECT_EQ(each.begin % 16, 0);
      }
      EXPECT_LT(std::abs((each.end - each.begin) - (total / parts)), 32)
          << total << ' ' << parts;
    }
    EXPECT_EQ(end, total);
    EXPECT_EQ(
        places[0].server, stable_hash(key) % static_cast<uint64_t>(servers));
  }
}

TEST(SliceTest, SlicesOfFewElementsAreCutAsTheyAre) {
  const auto places = place("w", spec_of(7), 3, 20);
  ASSERT_EQ(places.size(), 3);
  EXPECT_EQ(places[1].begin, 2);
  EXPECT_EQ(places[2].begin, 4);
  EXPECT_EQ(places[2].end, 7);
}

KeySpec spec_of_rows(std::vector<int64_t> sizes) {
  KeySpec spec = spec_of(1);
  for (const int64_t size : sizes) {
    spec.total *= size;
  }
  spec.sizes = std::move(sizes);
  return spec;
}

// With 32 rows or more in a slice, however long they are.
TEST(SliceTest, SlicesBeginAtRowsWhereTheyHaveEnough) {
  struct Case {
    std::vector<int64_t> sizes;
    int64_t alignment;
  };
  for (const auto& [sizes, alignment] : std::vector<Case>{
           {{64, 3001}, 3001},
           {{63, 3001}, 16},
           {{1023, 5}, 5}, // 511 rows and 31 times 16 of them
           {{1024, 5}, 80},
           {{1024, 2, 4}, 16},
           {{1024, 1}, 16},
           {{1024}, 16}}) {
    const KeySpec spec = spec_of_rows(sizes);
    const auto places = place("w", spec, 2, 64);
    ASSERT_EQ(places.size(), 2);
    const int64_t half = spec.total / 2;
    EXPECT_EQ(places[1].begin, half - (half % alignment)) << spec.total;
    EXPECT_EQ(row_size(spec), spec.total / sizes[0]);
  }
  const auto places = place("w", spec_of_rows({3001, 7}), 3, 64);
  ASSERT_EQ(places.size(), 3);
  for (const auto& each : places) {
    EXPECT_EQ(each.begin % 7, 0);
  }
  EXPECT_EQ(places[2].end, 3001 * 7);
}

TEST(SliceTest, CellsDivideRowsAndSlices) {
  const auto size = [](const KeySpec& spec) {
    return cell_size(spec, place("w", spec, 2, 64));
  };
  EXPECT_EQ(size(spec_of_rows({64, 3001})), 3001);
  EXPECT_EQ(size(spec_of_rows({20, 3001})), 1);
  EXPECT_EQ(size(spec_of_rows({20, 24})), 24); // at row 10
  EXPECT_EQ(size(spec_of_rows({15, 72})), 24); // at element 540, cut to 528
  EXPECT_EQ(size(spec_of_rows({2, 3})), 3); // not split
  EXPECT_EQ(size(spec_of_rows({5, 0})), 0);
  EXPECT_EQ(size(spec_of_rows({})), 1);
}

KeySpec row_sparse_spec(std::vector<int64_t> sizes) {
  KeySpec spec;
  spec.sizes = std::move(sizes);
  spec.row_init = RowInit();
  return spec;
}

TEST(SliceTest, EachServerHasASliceOfARowSparseKey) {
  KeySpec spec =
      row_sparse_spec({std::numeric_limits<int64_t>::max() / 6, 2, 3});
  EXPECT_EQ(row_size(spec), 6);
  for (const int32_t num_servers : {1, 3, 4}) {
    const auto places = place("w", spec, num_servers, 1 << 16);
    ASSERT_EQ(places.size(), num_servers);
    for (int32_t i = 0; i < num_servers; ++i) {
      const Place& at = places[static_cast<size_t>(i)];
      EXPECT_EQ(at.index, i);
      EXPECT_EQ(
          at.server,
          (stable_hash("w") + static_cast<uint64_t>(i)) %
              static_cast<uint64_t>(num_servers));
      EXPECT_EQ(at.begin, 0);
      EXPECT_EQ(at.end, 0);
    }
    EXPECT_EQ(cell_size(spec, places), 6);
  }
  spec.whole = true;
  EXPECT_EQ(place("w", spec, 4, 1 << 16).size(), 1);
}

TEST(SliceTest, WhatARowSparseKeyBeginsWithIsRank0s) {
  const KeySpec spec = row_sparse_spec({9, 2});
  KeySpec other = spec;
  other.row_init->seed = 7;
  EXPECT_EQ(spec, other);
  other.row_init.reset();
  EXPECT_FALSE(spec == other);
}

// Fixed for ever: another choice would lose the rows of stored snapshots.
TEST(SliceTest, RowsAreSpreadWhateverTheirIds) {
  EXPECT_EQ(slice_of_row(0, 1000003), 0xE220A8397B1DCDAFU % 1000003);
  for (const int64_t factor : {1, 2, 4096, 1'000'000'007}) {
    std::vector<int> counts(4);
    for (int64_t i = 0; i < 40000; ++i) {
      ++counts[slice_of_row(i * factor, 4)];
    }
    for (const int count : counts) {
      EXPECT_NEAR(count, 10000, 400) << factor;
    }
  }
}

TEST(SliceTest, HugeKeysDoNotOverflow) {
  const int64_t total = int64_t{1} << 60;
  const auto places = place("w", spec_of(total), 7, 1 << 16);
  ASSERT_EQ(places.size(), 7);
  for (size_t i = 1; i < places.size(); ++i) {
    EXPECT_GT(places[i].begin, places[i - 1].begin);
  }
  EXPECT_EQ(places[6].end, total);
}

TEST(MessageTest, EveryKindHasAName) {
  std::set<std::string> names;
  for (int i = 0; i < kNumKinds; ++i) {
    EXPECT_TRUE(names.insert(name(static_cast<Kind>(i))).second) << i;
  }
  EXPECT_EQ(names.count("?"), 0);
  EXPECT_EQ(names.count("PUSHPULL"), 1);
}

TEST(MessageTest, ErrorsAreOrderedByCodeThenSlice) {
  const Error a{ErrorCode::kShape, 1, SliceId{"a", 0}, "x", {}};
  Error b = a;
  EXPECT_TRUE(a == b);
  b.slice = SliceId{"b", 0};
  EXPECT_TRUE(a < b && !(b < a) && !(a == b));
  b.code = ErrorCode::kConfig;
  EXPECT_TRUE(b < a && !(a < b));
}

} // namespace
} // namespace torchkv::dist

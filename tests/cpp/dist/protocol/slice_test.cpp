// Slices: their names and order, and where they are.
#include "dist/protocol/slice.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
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

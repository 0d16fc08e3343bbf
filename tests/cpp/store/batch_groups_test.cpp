// How the tensors of repeated keys are merged.
#include "store/batch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "numbers.h"

namespace torchkv {
namespace {

using testing::number;
using testing::numbers;

EntryPtr entry(int64_t key) {
  return c10::make_intrusive<Entry>(Key(key), Meta());
}

TEST(GroupsTest, LeavesDistinctKeysAlone) {
  const Entries entries{entry(1), entry(2)};
  const Tensors tensors({{number(1)}, {number(2), number(3)}});
  const Groups groups(entries, tensors);
  EXPECT_EQ(groups.entries(), entries);
  EXPECT_EQ(&groups.tensors(), &tensors);
}

TEST(GroupsTest, KeepsTheOrderOfFirstAppearance) {
  const EntryPtr a = entry(1);
  const EntryPtr b = entry(2);
  const Tensors tensors(
      {{number(1), number(2)}, {number(3)}, {number(4)}, {number(5)}});
  const Groups groups({b, a, b, a}, tensors);
  EXPECT_EQ(groups.entries(), (Entries{b, a}));
  EXPECT_EQ(numbers(groups.tensors().of(0)), (std::vector<int64_t>{1, 2, 4}));
  EXPECT_EQ(numbers(groups.tensors().of(1)), (std::vector<int64_t>{3, 5}));
}

TEST(GroupsTest, MatchesAPlainLoopForAnyNumberOfKeys) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<EntryPtr> all;
    all.reserve(12);
    for (int64_t i = 0; i < 12; ++i) {
      all.push_back(entry(i));
    }
    const size_t num_keys = 1 + random() % 30;
    Entries entries;
    Tensors tensors;
    std::vector<EntryPtr> expected_entries;
    std::vector<std::vector<int64_t>> expected;
    int64_t next = 0;
    for (size_t i = 0; i < num_keys; ++i) {
      const EntryPtr& chosen = all[random() % all.size()];
      entries.push_back(chosen);
      const auto seen = static_cast<size_t>(
          std::find(expected_entries.begin(), expected_entries.end(), chosen) -
          expected_entries.begin());
      if (seen == expected_entries.size()) {
        expected_entries.push_back(chosen);
        expected.emplace_back();
      }
      const size_t num_tensors = 1 + random() % 3;
      for (size_t j = 0; j < num_tensors; ++j) {
        expected[seen].push_back(next);
        tensors.append(number(next++));
      }
      tensors.end_group();
    }
    const Groups groups(std::move(entries), tensors);
    ASSERT_EQ(groups.entries().size(), expected_entries.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(groups.entries()[i], expected_entries[i]) << "seed " << seed;
      const auto group = groups.tensors().of(static_cast<int64_t>(i));
      ASSERT_EQ(numbers(group), expected[i]) << "seed " << seed;
    }
  }
}

// Encodings stay with their payloads.
TEST(GroupsTest, KeepsEncodings) {
  const auto encoding = std::make_shared<Encoding>();
  Tensors tensors({{number(1)}, {number(2)}, {number(3), number(4)}});
  tensors.encodings = {nullptr, nullptr, encoding, nullptr};
  const EntryPtr repeated = entry(1);
  const Groups groups({repeated, entry(2), repeated}, tensors);
  const Tensors& merged = groups.tensors();
  EXPECT_EQ(numbers(merged.flat), (std::vector<int64_t>{1, 3, 4, 2}));
  ASSERT_EQ(merged.encodings.size(), 4);
  EXPECT_EQ(merged.value(1).encoding, encoding.get());
  for (const int64_t i : {0, 2, 3}) {
    EXPECT_NE(merged.value(i).dense(), nullptr) << i;
  }
}

} // namespace
} // namespace torchkv

// How the tensors of repeated keys are merged.
#include "store/entries.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace torchkv {
namespace {

EntryPtr entry(int64_t key) {
  return c10::make_intrusive<Entry>(Key(key), Meta());
}

std::vector<int64_t> numbers(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<int64_t> result;
  for (const auto& tensor : tensors) {
    result.push_back(tensor.item<int64_t>());
  }
  return result;
}

at::Tensor number(int64_t value) {
  return at::scalar_tensor(value, at::kLong);
}

TEST(MergeRepeatsTest, LeavesDistinctKeysAlone) {
  Entries entries{entry(1), entry(2)};
  const Entries before = entries;
  const Tensors tensors({{number(1)}, {number(2), number(3)}});
  EXPECT_FALSE(merge_repeats(entries, tensors).has_value());
  EXPECT_EQ(entries, before);
}

TEST(MergeRepeatsTest, KeepsTheOrderOfFirstAppearance) {
  const EntryPtr a = entry(1);
  const EntryPtr b = entry(2);
  Entries entries{b, a, b, a};
  const Tensors tensors =
      merge_repeats(
          entries,
          Tensors(
              {{number(1), number(2)}, {number(3)}, {number(4)}, {number(5)}}))
          .value();
  EXPECT_EQ(entries, (Entries{b, a}));
  EXPECT_EQ(numbers(tensors.of(0)), (std::vector<int64_t>{1, 2, 4}));
  EXPECT_EQ(numbers(tensors.of(1)), (std::vector<int64_t>{3, 5}));
}

// The few-keys path and the hashing path must agree with the plain loop.
TEST(MergeRepeatsTest, MatchesAPlainLoopForAnyNumberOfKeys) {
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
    if (auto merged = merge_repeats(entries, tensors)) {
      tensors = *std::move(merged);
    }
    ASSERT_EQ(entries.size(), expected_entries.size()) << "seed " << seed;
    for (size_t i = 0; i < entries.size(); ++i) {
      ASSERT_EQ(entries[i], expected_entries[i]) << "seed " << seed;
      ASSERT_EQ(numbers(tensors.of(static_cast<int64_t>(i))), expected[i])
          << "seed " << seed;
    }
  }
}

// Encodings stay with their payloads.
TEST(MergeRepeatsTest, KeepsEncodings) {
  const auto encoding = std::make_shared<Encoding>();
  Tensors tensors({{number(1)}, {number(2)}, {number(3), number(4)}});
  tensors.encodings = {nullptr, nullptr, encoding, nullptr};
  const EntryPtr repeated = entry(1);
  Entries entries{repeated, entry(2), repeated};
  const auto merged = merge_repeats(entries, tensors);
  ASSERT_TRUE(merged.has_value());
  EXPECT_EQ(numbers(merged->flat), (std::vector<int64_t>{1, 3, 4, 2}));
  ASSERT_EQ(merged->encodings.size(), 4);
  EXPECT_EQ(merged->value(1).encoding, encoding.get());
  for (const int64_t i : {0, 2, 3}) {
    EXPECT_NE(merged->value(i).dense(), nullptr) << i;
  }
}

} // namespace
} // namespace torchkv

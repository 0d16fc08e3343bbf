// Sharding of values over places.
#include "memory/shard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace torchkv {
namespace {

using Loads = std::vector<int64_t>;

constexpr int64_t kGrain = 1024;

int64_t bytes_of(const ValueSize& value) {
  return value.num_elements * value.element_size;
}

// Checks that the shards cover each value once, in order; returns the places'
// loads.
Loads loads_after(
    const std::vector<ValueSize>& values,
    const std::vector<Shard>& shards,
    Loads loads) {
  auto shard = shards.begin();
  for (size_t i = 0; i < values.size(); ++i) {
    int64_t next = 0;
    do {
      if (shard == shards.end() || shard->value != i) {
        ADD_FAILURE() << "value " << i << " ends at " << next;
        return loads;
      }
      EXPECT_EQ(shard->begin, next);
      next = shard->end;
      loads.at(shard->place) +=
          (shard->end - shard->begin) * values[i].element_size;
      ++shard;
    } while (next != values[i].num_elements);
  }
  EXPECT_TRUE(shard == shards.end());
  return loads;
}

std::vector<ValueSize> random_values(std::mt19937& random, size_t count) {
  std::vector<ValueSize> values;
  for (size_t i = 0; i < count; ++i) {
    const int64_t size = int64_t{1} << random() % 5;
    const int64_t most = random() % 3 == 0 ? 100 : 20 * kGrain;
    values.push_back({static_cast<int64_t>(random() % most), size});
  }
  return values;
}

TEST(ShardTest, AllPlacesEndUpEquallyLoaded) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const auto values = random_values(random, 1 + random() % 20);
    Loads loads(1 + random() % 8);
    for (auto& load : loads) {
      load = static_cast<int64_t>(random() % (30 * kGrain));
    }
    const auto shards = shard_all(values, loads, kGrain);
    const Loads after = loads_after(values, shards, loads);
    // Each place that received data may be off by half of an unshardable value,
    // the last by all of the others' together.
    Loads taken;
    for (size_t i = 0; i + 1 < after.size(); ++i) {
      if (after[i] != loads[i]) {
        taken.push_back(after[i]);
      }
    }
    std::sort(taken.begin(), taken.end());
    if (!taken.empty()) {
      EXPECT_LE(taken.back() - taken.front(), 2 * kGrain) << trial;
    }
    for (const auto& shard : shards) {
      const ValueSize& value = values[shard.value];
      const bool is_whole = shard.end - shard.begin == value.num_elements;
      if (!is_whole) {
        EXPECT_EQ(shard.begin * value.element_size % kGrain, 0);
        EXPECT_GE((shard.end - shard.begin) * value.element_size, kGrain);
      }
    }
  }
}

TEST(ShardTest, OneLargeValueIsShardedEvenly) {
  const std::vector<Shard> shards =
      shard_all(ValueSize{4096, 4}, {0, 0, 0, 0}, 1024);
  ASSERT_EQ(shards.size(), 4);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(shards[i].place, i);
    EXPECT_EQ(shards[i].begin, static_cast<int64_t>(1024 * i));
    EXPECT_EQ(shards[i].end, static_cast<int64_t>(1024 * (i + 1)));
  }
}

TEST(ShardTest, AMoreLoadedPlaceReceivesLess) {
  const auto shards = shard_all(ValueSize{4096, 1}, {1024, 3072, 0}, 256);
  EXPECT_EQ(
      loads_after({{4096, 1}}, shards, {1024, 3072, 0}),
      (Loads{2560, 3072, 2560}));
}

TEST(ShardTest, SmallValuesStayWholeAndAreDistributed) {
  const std::vector<ValueSize> values(4, {8, 4});
  const auto shards = shard_all(values, {0, 0, 0, 0}, kGrain);
  EXPECT_EQ(loads_after(values, shards, {0, 0, 0, 0}), (Loads{32, 32, 32, 32}));
}

TEST(ShardTest, EmptyValuesHaveAShard) {
  const std::vector<ValueSize> values{{0, 4}, {4, 4}, {0, 4}};
  for (const auto& divide : {shard_all, shard_each}) {
    EXPECT_EQ(
        loads_after(values, divide(values, {0}, kGrain), {0}), (Loads{16}));
  }
}

TEST(ShardTest, EachIsShardedEvenly) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 200; ++trial) {
    const auto values = random_values(random, 1 + random() % 10);
    const Loads loads(1 + random() % 8);
    const auto shards = shard_each(values, loads, kGrain);
    loads_after(values, shards, loads);
    for (size_t i = 0; i < shards.size(); ++i) {
      const ValueSize& value = values[shards[i].value];
      const int64_t size = shards[i].end - shards[i].begin;
      if (bytes_of(value) < kGrain * static_cast<int64_t>(loads.size())) {
        EXPECT_EQ(size, value.num_elements);
        continue;
      }
      EXPECT_EQ(shards[i].begin * value.element_size % 16, 0);
      const bool is_last = shards[i].end == value.num_elements;
      if (!is_last) {
        EXPECT_EQ(size, shards[i + 1].begin - shards[i].begin);
        EXPECT_GE(size, shards[i + 1].end - shards[i + 1].begin);
        EXPECT_EQ(shards[i + 1].place, shards[i].place + 1);
      }
    }
  }
}

TEST(ShardTest, EachSmallValueGoesToTheLeastLoadedPlace) {
  const std::vector<ValueSize> values{{100, 4}, {10, 4}, {10, 4}};
  EXPECT_EQ(
      loads_after(
          values, shard_each(values, {0, 300, 350}, kGrain), {0, 300, 350}),
      (Loads{400, 380, 350}));
}

} // namespace
} // namespace torchkv

// Placement of stored values: sharding and gathering.
#include "memory/placement.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "counting_runtime.h"
#include "optimizer_helpers.h"

namespace torchkv {
namespace {

constexpr auto kShardAll = Placement::Policy::kShardAll;

class PlacementTest : public ::testing::Test {
 protected:
  using EntryOwner = c10::intrusive_ptr<Entry>;

  EntryOwner stored(const at::Tensor& value, int64_t key = 1) {
    auto entry = c10::make_intrusive<Entry>(
        Key(key),
        Meta{
            c10::SmallVector<int64_t, 4>(value.sizes()),
            value.scalar_type(),
            value.numel()});
    placement_.store(*entry, value);
    return entry;
  }

  // As a pull into three outs, one on each place.
  void place(std::vector<EntryOwner> entries, bool may_shard = true) {
    std::vector<std::vector<at::Tensor>> outs;
    std::vector<Item> items;
    outs.reserve(entries.size());
    for (const auto& entry : entries) {
      outs.emplace_back(3, at::empty(entry->meta.sizes));
      items.push_back({entry.get(), {}, outs.back(), nullptr});
    }
    placement_.place(items, may_shard);
  }

  static std::vector<int32_t> homes_of(const Entry& entry) {
    std::vector<int32_t> result;
    for (const auto& slice : entry.slices) {
      result.push_back(slice.home.index);
    }
    return result;
  }

  at::Tensor value_of(Entry& entry) {
    return slices_.copy_of(entry, c10::kCPU);
  }

  testing::CountingRuntime runtime_;
  const Places places_{"cpu,cpu,cpu"};
  Streams streams_{runtime_};
  Slices slices_{streams_};
  Placement placement_{kShardAll, slices_, streams_, places_};
};

TEST_F(PlacementTest, ShardsAValueAndGathersIt) {
  for (const at::Tensor& value :
       {at::arange(60.0).view({3, 4, 5}),
        at::arange(60.0).view({3, 4, 5}).transpose(0, 2),
        at::arange(60).to(at::kChar),
        at::arange(60).to(at::kComplexDouble)}) {
    const auto entry = stored(value);
    place({entry});
    EXPECT_EQ(entry->placing, Placing::kSharded);
    EXPECT_EQ(homes_of(*entry), (std::vector<int32_t>{0, 1, 2}));
    for (const auto& slice : entry->slices) {
      EXPECT_EQ(slice.value.dim(), 1);
    }
    const at::Tensor copy = value_of(*entry);
    EXPECT_EQ(copy.strides(), value.strides());
    EXPECT_TRUE(at::equal(copy, value));
    placement_.gather(*entry);
    ASSERT_EQ(entry->slices.size(), 1);
    EXPECT_EQ(entry->placing, Placing::kWhole);
    EXPECT_EQ(entry->slices[0].value.strides(), value.strides());
    EXPECT_TRUE(at::equal(entry->slices[0].value, value));
    place({entry}); // again
    EXPECT_EQ(entry->slices.size(), 3);
    EXPECT_TRUE(at::equal(value_of(*entry), value));
  }
}

TEST_F(PlacementTest, AValueThatIsNotDenseIsStoredContiguous) {
  const at::Tensor value = at::arange(60.0).view({30, 2}).select(1, 1);
  const auto entry = stored(value);
  place({entry});
  EXPECT_TRUE(value_of(*entry).is_contiguous());
  EXPECT_TRUE(at::equal(value_of(*entry), value));
}

TEST_F(PlacementTest, ShardsTheValuesOfACallTogether) {
  const auto a = stored(at::zeros(40), 1);
  const auto b = stored(at::zeros(40), 2);
  const auto c = stored(at::zeros(40), 3);
  place({a, b, c});
  EXPECT_EQ(homes_of(*a), (std::vector<int32_t>{0}));
  EXPECT_EQ(homes_of(*b), (std::vector<int32_t>{1}));
  EXPECT_EQ(homes_of(*c), (std::vector<int32_t>{2}));
  const auto d = stored(at::zeros(12), 4); // beside the present values
  place({d});
  EXPECT_EQ(homes_of(*d), (std::vector<int32_t>{0, 1, 2}));
}

TEST_F(PlacementTest, PlacesWholeValuesLargestFirst) {
  std::vector<EntryOwner> entries;
  for (const int64_t size : {10, 70, 20, 100, 40}) {
    entries.push_back(stored(at::zeros(size)));
  }
  place(entries, /*may_shard=*/false);
  std::vector<int32_t> homes;
  for (const auto& entry : entries) {
    ASSERT_EQ(entry->slices.size(), 1);
    homes.push_back(entry->slices[0].home.index);
  }
  // 100 -> 0, 70 -> 1, 40 -> 2, 20 -> 2, 10 -> 2
  EXPECT_EQ(homes, (std::vector<int32_t>{2, 1, 2, 0, 2}));
}

TEST_F(PlacementTest, WholeValuesOfAPlaceAreShardedLater) {
  const auto entry = stored(at::arange(60.0));
  place({entry}, /*may_shard=*/false);
  EXPECT_EQ(homes_of(*entry), (std::vector<int32_t>{0}));
  place({entry});
  EXPECT_EQ(homes_of(*entry), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_TRUE(at::equal(value_of(*entry), at::arange(60.0)));
}

TEST_F(PlacementTest, AdoptedValuesCount) {
  Placement other(kShardAll, slices_, streams_, places_);
  const auto entry = stored(at::zeros(10));
  const at::Tensor out = at::empty(10);
  other.adopt(*entry);
  other.place(Item{entry.get(), {}, out, nullptr}, /*may_shard=*/true);
  ASSERT_EQ(homes_of(*entry), (std::vector<int32_t>{0}));
  for (const int32_t home : {2, 1}) { // before and after
    const auto small = stored(at::zeros(4));
    place({small});
    EXPECT_EQ(homes_of(*small), (std::vector<int32_t>{home}));
    placement_.adopt(*entry);
  }
}

TEST_F(PlacementTest, OneTensorDoesNotShard) {
  const auto entry = stored(at::arange(60.0));
  const at::Tensor out = at::empty(60);
  placement_.place(Item{entry.get(), {}, out, nullptr}, /*may_shard=*/true);
  EXPECT_EQ(homes_of(*entry), (std::vector<int32_t>{0}));
}

TEST_F(PlacementTest, ALocalStoreNeverShards) {
  Placement local(Placement::Policy::kCpu, slices_, streams_, places_);
  const auto entry = c10::make_intrusive<Entry>(1, Meta{{60}, at::kFloat, 60});
  local.store(*entry, at::arange(60.0));
  const std::vector<at::Tensor> outs(3, at::empty(60));
  local.place(Item{entry.get(), {}, outs, nullptr}, /*may_shard=*/true);
  EXPECT_EQ(homes_of(*entry), (std::vector<int32_t>{-1}));
}

TEST_F(PlacementTest, StateMovesWithItsElements) {
  for (const bool is_empty : {false, true}) {
    const at::Tensor value =
        at::arange(is_empty ? 0.0 : 60.0).to(at::kBFloat16).view({-1, 6}).t();
    const auto like = [&](double first) {
      return (value.to(at::kFloat) + first).contiguous();
    };
    const RuleSpec rule = make_rule("test", "adam", {});
    const KeyState state{
        5,
        2,
        {{"exp_avg", like(1)},
         {"exp_avg_sq", like(2)},
         {"master", like(3)},
         {"accumulated", like(4)}}};
    const auto entry = stored(value);
    slices_.set_state(*entry, rule, state);
    place({entry}); // shards the state, too
    testing::expect_same_state(slices_.state_of(*entry, rule), state);
    EXPECT_EQ(
        entry->slices[0].states[0].numel(), entry->slices[0].value.numel());
    slices_.set_state(*entry, rule, {});
    EXPECT_TRUE(slices_.state_of(*entry, rule).tensors.empty());
    slices_.set_state(*entry, rule, state);
    placement_.gather(*entry);
    testing::expect_same_state(slices_.state_of(*entry, rule), state);
    slices_.clear_state(*entry);
    EXPECT_TRUE(slices_.state_of(*entry, rule).tensors.empty());
  }
}

TEST_F(PlacementTest, RunningOutOfMemoryChangesNothing) {
  const at::Tensor value = at::arange(60.0);
  const RuleSpec rule = make_rule("test", "adam", {});
  const KeyState state{1, 0, {{"exp_avg", value}, {"exp_avg_sq", value}}};
  const auto entry = stored(value);
  for (const int64_t num_left : {0, 1, 2}) {
    runtime_.num_left = num_left;
    EXPECT_THROW(place({entry}), c10::Error);
    EXPECT_EQ(homes_of(*entry), (std::vector<int32_t>{-1}));
  }
  runtime_.num_left = 1 << 30;
  place({entry});
  ASSERT_EQ(entry->slices.size(), 3);
  for (int64_t num_left = 0; num_left < 6; ++num_left) {
    runtime_.num_left = num_left;
    EXPECT_THROW(slices_.set_state(*entry, rule, state), c10::Error);
    runtime_.num_left = 1 << 30;
    EXPECT_TRUE(slices_.state_of(*entry, rule).tensors.empty());
  }
  runtime_.num_left = 0;
  EXPECT_THROW(placement_.gather(*entry), c10::Error);
  runtime_.num_left = 1 << 30;
  EXPECT_EQ(entry->slices.size(), 3);
  EXPECT_TRUE(at::equal(value_of(*entry), value));
}

} // namespace
} // namespace torchkv

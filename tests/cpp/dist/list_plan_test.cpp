#include "dist/list_plan.h"

#include <gtest/gtest.h>

namespace torchkv::dist {
namespace {

EntryPtr entry(
    const Key& key,
    int64_t num_elements,
    c10::ScalarType dtype = c10::kFloat) {
  return c10::make_intrusive<Entry>(
      key, Meta{{num_elements}, dtype, num_elements, false});
}

std::optional<int32_t> server_of(const Entry& of) {
  return static_cast<int32_t>(of.key.id() % 2);
}

TEST(ListPlanTest, SmallValuesOfAServerAndADtypeTravelTogether) {
  ListPlans plans;
  const Entries entries{
      entry(0, 5),
      entry(2, 7),
      entry(1, 3),
      entry(4, 1024), // too large
      entry(6, 1023),
      entry(3, 4),
      entry(8, 2, c10::kDouble), // the only one of its dtype
      entry(10, 0)};
  const ListPlanPtr plan = plans.of(entries, server_of);
  ASSERT_TRUE(plan);
  ASSERT_EQ(plan->lists.size(), 2);
  EXPECT_EQ(plan->lists[0].numbers, (std::vector<size_t>{0, 1, 4}));
  EXPECT_EQ(plan->lists[1].numbers, (std::vector<size_t>{2, 5}));
  EXPECT_EQ(plan->rest, (std::vector<size_t>{3, 6, 7}));
  EXPECT_EQ(plan->lists[0].slices->num_elements(), 5 + 7 + 1023);
  EXPECT_EQ(plan->lists[0].slices->begin(2), 12);
  EXPECT_EQ(plan->lists[0].slices->name(), (SliceId{0, SliceId::kList}));
  EXPECT_EQ(plan->lists[0].num_bytes(), 4 * (5 + 7 + 1023));
  EXPECT_EQ(plans.of(entries, server_of), plan);
}

TEST(ListPlanTest, ListsHaveALimit) {
  ListPlans plans;
  Entries entries;
  for (int64_t i = 0; i < 10'000; ++i) {
    entries.push_back(entry(2 * i, i < 600 ? 1000 : 1));
  }
  const ListPlanPtr plan = plans.of(entries, server_of);
  size_t count = 0;
  for (const auto& list : plan->lists) {
    EXPECT_LE(list.num_bytes(), 1 << 20);
    EXPECT_LE(list.slices->num_bytes(), 32 << 10);
    EXPECT_EQ(list.slices->size(), list.numbers.size());
    count += list.numbers.size();
  }
  EXPECT_EQ(count + plan->rest.size(), entries.size());
  EXPECT_LE(plan->rest.size(), 1);
}

TEST(ListPlanTest, OtherCallsHaveNone) {
  ListPlans plans;
  const EntryPtr one = entry(0, 5);
  const EntryPtr other = entry(2, 5);
  EXPECT_FALSE(plans.of({one}, server_of));
  EXPECT_FALSE(plans.of({one, other, one}, server_of)); // summed first
  EXPECT_FALSE(plans.of({one, entry(1, 5)}, server_of)); // of two servers
  const auto split = [](const Entry& /*entry*/) {
    return std::optional<int32_t>();
  };
  EXPECT_FALSE(plans.of({one, other, entry(4, 5)}, split));
  EXPECT_TRUE(plans.of({one, other}, server_of));
}

TEST(ListPlanTest, AKeyThatIsMadeAnewIsAnotherOne) {
  ListPlans plans;
  const EntryPtr one = entry(0, 5);
  const ListPlanPtr before = plans.of({one, entry(2, 5)}, server_of);
  const ListPlanPtr after = plans.of({one, entry(2, 6)}, server_of);
  EXPECT_NE(before, after);
  EXPECT_EQ(after->lists[0].slices->num_elements(1), 6);
}

TEST(ListPlanTest, EntriesAreFreedWithThePlans) {
  ListPlans plans;
  Entries entries{entry(0, 5), entry(2, 7), entry(4, 1'000'000)};
  const ListPlanPtr plan = plans.of(entries, server_of);
  EXPECT_EQ(entries[2].use_count(), 2);
  plans.clear();
  EXPECT_EQ(entries[2].use_count(), 1);
  EXPECT_EQ(plan->lists[0].slices->num_elements(), 5 + 7); // it lives on
}

} // namespace
} // namespace torchkv::dist

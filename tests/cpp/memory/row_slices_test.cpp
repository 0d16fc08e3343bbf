// The memory of row-sparse values: it grows and shrinks with the rows, and what
// an optimizer has for them stays with its row.
#include "memory/row_slices.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <new>

#include "memory/row_table.h"

namespace torchkv {
namespace {

struct RowSlicesTest : ::testing::Test {
  RowSlicesTest()
      : entry(Key(3), Meta{{1 << 20, 3}, at::kHalf, 3 << 20, true}) {
    make_row_sparse(entry, RowInit());
  }
  Slice& slice() {
    return entry.slices[0];
  }
  at::Tensor slots(
      const std::vector<int64_t>& ids,
      const RuleSpec* rule = nullptr) {
    return slots_of(entry, at::tensor(ids, at::kLong), rule);
  }

  Entry entry;
};

TEST_F(RowSlicesTest, NewRowsBeginAsTheirRuleSays) {
  RuleSpec rule;
  rule.id = RuleSpec::Id::kAdagrad;
  rule.initial_accumulator_value = 0.5;
  slots({7, 5}, &rule);
  slice().value.fill_(2);
  slice().master = at::full({2, 3}, 2.25);
  slice().states[0] = at::full({2, 3}, 9.0);
  slice().accumulated = at::full({2, 3}, 4.0);
  const at::Tensor found = slots({5, 1, 1, 8}, &rule);
  EXPECT_TRUE(at::equal(found, at::tensor({1, 2, 2, 3}, at::kLong)));
  const auto expect_rows =
      [](const at::Tensor& tensor, double old, double fresh) {
        EXPECT_EQ(tensor.size(0), 4);
        EXPECT_TRUE(tensor.narrow(0, 0, 2).eq(old).all().item<bool>());
        EXPECT_TRUE(tensor.narrow(0, 2, 2).eq(fresh).all().item<bool>());
      };
  expect_rows(slice().value, 2, 0);
  expect_rows(slice().master, 2.25, 0);
  expect_rows(slice().states[0], 9, 0.5);
  expect_rows(slice().accumulated, 4, 0);
  EXPECT_FALSE(slice().states[1].defined());
  EXPECT_EQ(slice().end, 12);
  EXPECT_EQ(entry.rows->num_bytes, 4 * 3 * 2);
}

TEST(RowSlicesMemoryTest, RowsWithoutMemoryAreNotAdded) {
  // A row that is larger than the address space.
  constexpr int64_t kHuge = int64_t{1} << 46U;
  Entry entry(Key(3), Meta{{9, kHuge}, at::kHalf, 9 * kHuge, true});
  make_row_sparse(entry, RowInit());
  EXPECT_THROW(
      slots_of(entry, at::tensor({7, 5}, at::kLong), nullptr), std::bad_alloc);
  EXPECT_EQ(entry.rows->size(), 0);
  EXPECT_EQ(entry.slices[0].value.size(0), 0);
  const int64_t id = 7;
  int64_t slot = 0;
  entry.rows->find(&id, 1, &slot);
  EXPECT_EQ(slot, -1);
}

TEST_F(RowSlicesTest, MemoryGrowsLessOftenThanRowsCome) {
  const void* data = nullptr;
  int num_moves = 0;
  for (int64_t id = 0; id < 1000; ++id) {
    slots({id});
    num_moves += slice().value.const_data_ptr() == data ? 0 : 1;
    data = slice().value.const_data_ptr();
    slice().value[id].fill_(static_cast<double>(id));
  }
  EXPECT_LT(num_moves, 40);
  EXPECT_TRUE(
      at::equal(
          slice().value.select(1, 2),
          at::arange(1000, at::kFloat).to(at::kHalf)));
}

// Enough rows to leave the heap and to return to it.
TEST_F(RowSlicesTest, LargeMemoryGrowsAndShrinksWithItsStates) {
  constexpr int64_t kStep = 700'000;
  slice().states[0] = at::empty({0, 3}, at::kFloat);
  RuleSpec rule;
  rule.id = RuleSpec::Id::kAdagrad;
  int64_t count = 0;
  const auto expect_ids = [&] {
    const at::Tensor ids = at::arange(count).remainder(1000);
    EXPECT_TRUE(at::equal(slice().value.select(1, 1), ids.to(at::kHalf)));
    EXPECT_TRUE(at::equal(slice().states[0].select(1, 2), ids.to(at::kFloat)));
  };
  while (count < 6 * kStep) {
    slots_of(entry, at::arange(count, count + kStep, at::kLong), &rule);
    const at::Tensor ids =
        at::arange(count, count + kStep).remainder(1000).unsqueeze(1);
    slice().value.narrow(0, count, kStep).copy_(ids);
    slice().states[0].narrow(0, count, kStep).copy_(ids);
    count += kStep;
    expect_ids();
  }
  const size_t most = slice().states[0].storage().nbytes();
  for (const int64_t left : {kStep, int64_t{500}}) {
    const at::Tensor ids = at::arange(left, count, at::kLong);
    remove_rows(entry, ids.const_data_ptr<int64_t>(), ids.numel());
    count = left;
    expect_ids();
    EXPECT_LT(slice().states[0].storage().nbytes(), most / 2);
  }
}

TEST_F(RowSlicesTest, RemovedRowsLeaveNoGapAndFreeMemory) {
  const at::Tensor ids = at::arange(400'000, at::kLong);
  slots_of(entry, ids, nullptr);
  slice().value.copy_(ids.remainder(1000).unsqueeze(1));
  slice().states[0] = slice().value.to(at::kFloat) * 2;
  remove_rows(entry, ids.const_data_ptr<int64_t>() + 1, 399'998);
  EXPECT_TRUE(at::equal(row_ids(entry), at::tensor({0, 399'999}, at::kLong)));
  EXPECT_TRUE(
      at::equal(
          slice().value.select(1, 0), at::tensor({0, 999}).to(at::kHalf)));
  EXPECT_TRUE(at::equal(slice().states[0], slice().value.to(at::kFloat) * 2));
  EXPECT_LT(slice().value.storage().nbytes(), 1000);
}

TEST_F(RowSlicesTest, KeepsOnlyTheseSlots) {
  slots({4, 9, 2, 6});
  slice().value.copy_(at::tensor({4, 9, 2, 6}).unsqueeze(1));
  keep_rows(entry, {at::tensor({2}, at::kLong), at::tensor({0, 2}, at::kLong)});
  const auto [ids, rows] = rows_by_id(entry);
  EXPECT_TRUE(at::equal(ids, at::tensor({2, 4}, at::kLong)));
  EXPECT_TRUE(at::equal(rows.select(1, 0), at::tensor({2, 4}).to(at::kHalf)));
  keep_rows(entry, {});
  EXPECT_EQ(entry.rows->size(), 0);
}

TEST_F(RowSlicesTest, CopiesRowsThatItDoesNotHave) {
  slots({4});
  slice().value.fill_(1);
  const at::Tensor out = at::full({3, 3}, 9.0, at::kHalf);
  copy_rows(entry, at::tensor({3, 4, 999}, at::kLong), out);
  EXPECT_TRUE(at::equal(out.select(1, 1), at::tensor({0, 1, 0}).to(at::kHalf)));
  EXPECT_EQ(entry.rows->size(), 1);
}

} // namespace
} // namespace torchkv

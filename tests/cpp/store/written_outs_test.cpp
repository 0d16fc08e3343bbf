#include "store/written_outs.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "memory/row_slices.h"

namespace torchkv {
namespace {

constexpr int64_t kLargeSize = 300'000; // more than 1 MiB

EntryPtr large_entry(const Key& key) {
  return c10::make_intrusive<Entry>(
      key, Meta{{kLargeSize}, c10::kFloat, kLargeSize, false});
}

// Of two keys, each with a value and an out of so many elements.
bool can_write(
    const at::Tensor& value,
    const at::Tensor& other_value,
    const at::Tensor& out,
    const at::Tensor& other_out) {
  const Keys keys{1, 2};
  const Tensors values({{value}, {other_value}});
  const Tensors outs({{out}, {other_out}});
  return can_write_with_sums(
      {"pushpull", keys, &values, &outs}, {large_entry(1), large_entry(2)});
}

TEST(WrittenOutsTest, OutsThatShareNoMemory) {
  const at::Tensor memory = at::empty({4 * kLargeSize});
  const auto part = [&](int64_t i, int64_t shift = 0) {
    return memory.slice(
        0, i * kLargeSize + shift, (i + 1) * kLargeSize + shift);
  };
  EXPECT_TRUE(can_write(part(0), part(1), part(2), part(3)));
  EXPECT_TRUE(can_write(part(3), part(2), part(1), part(0)));
  EXPECT_TRUE(can_write(part(0), part(0), part(2), part(3)));
  EXPECT_TRUE(can_write(part(0), part(1), part(0), part(3))); // its value
  EXPECT_TRUE(can_write(part(0), part(1), part(0), part(1)));

  EXPECT_FALSE(can_write(part(0), part(1), part(2), part(2)));
  EXPECT_FALSE(can_write(part(0), part(1), part(2, 1), part(2)));
  EXPECT_FALSE(can_write(part(0), part(1), part(1), part(3)));
  EXPECT_FALSE(can_write(part(0), part(1), part(1), part(0)));
  EXPECT_FALSE(can_write(part(0), part(1), part(0, 1), part(3)));
  EXPECT_FALSE(can_write(part(0, 1), part(2), part(0), part(3)));
  EXPECT_FALSE(can_write(part(0), part(0), part(0), part(3)));
}

TEST(WrittenOutsTest, OnlyWhereItSavesTime) {
  const at::Tensor small = at::empty({1000});
  EXPECT_FALSE(can_write(small, small, at::empty({1000}), at::empty({1000})));
}

TEST(WrittenOutsTest, NotOfRepeatedOrRowSparseKeys) {
  const Keys keys{1, 2};
  const Tensors tensors({{at::empty({kLargeSize})}, {at::empty({kLargeSize})}});
  const Call call{"pushpull", keys, &tensors, &tensors};
  const EntryPtr first = large_entry(1);
  EXPECT_TRUE(can_write_with_sums(call, {first, large_entry(2)}));
  EXPECT_FALSE(can_write_with_sums(call, {first, first}));
  const EntryPtr table = large_entry(2);
  make_row_sparse(*table, RowInit());
  EXPECT_FALSE(can_write_with_sums(call, {first, table}));
}

TEST(WrittenOutsTest, NotOfOtherCalls) {
  const Tensors tensors(at::empty({kLargeSize}));
  const Keys key(1);
  EXPECT_FALSE(can_write_with_sums({"push", key, &tensors}, {large_entry(1)}));
  EXPECT_FALSE(
      can_write_with_sums({"pull", key, nullptr, &tensors}, {large_entry(1)}));
}

} // namespace
} // namespace torchkv

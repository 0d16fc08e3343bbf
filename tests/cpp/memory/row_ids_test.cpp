#include "memory/row_ids.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace torchkv {
namespace {

at::Tensor ids_of(const std::vector<int64_t>& numbers) {
  return at::tensor(numbers, at::kLong);
}

TEST(RowIdsTest, SortsIdsAndKeepsTheOrderOfEqualOnes) {
  const RowSparse rows;
  set_ids(rows, ids_of({5, 1, 5, 0}), 6);
  EXPECT_TRUE(at::equal(rows.ids, ids_of({0, 1, 5, 5})));
  EXPECT_TRUE(at::equal(rows.order, ids_of({3, 1, 0, 2})));
  EXPECT_FALSE(rows.is_distinct);
}

TEST(RowIdsTest, AscendingIdsStayAsTheyAre) {
  const RowSparse rows;
  set_ids(rows, ids_of({3, 1}), 6); // an order to forget
  for (const bool is_distinct : {true, false}) {
    const at::Tensor ids = ids_of({1, 3, is_distinct ? 4 : 3});
    set_ids(rows, ids, 6);
    EXPECT_TRUE(rows.ids.is_same(ids));
    EXPECT_FALSE(rows.order.defined());
    EXPECT_EQ(rows.is_distinct, is_distinct);
  }
  set_ids(rows, ids_of({}), 6);
  EXPECT_EQ(rows.ids.numel(), 0);
}

TEST(RowIdsTest, IdsAreBroughtOnce) {
  RowSparse rows;
  rows.sizes = {6, 2};
  rows.ids_on_device = ids_of({4, 2}); // this device is the host
  bring_ids(rows);
  EXPECT_TRUE(at::equal(rows.ids, ids_of({2, 4})));
  EXPECT_TRUE(at::equal(rows.order, ids_of({1, 0})));
  rows.ids_on_device.reset();
  bring_ids(rows);
  EXPECT_EQ(rows.ids.numel(), 2);
}

TEST(RowIdsTest, ChangedIdsAreRefused) {
  for (const int64_t bad : {int64_t{-1}, int64_t{6}}) {
    RowSparse rows;
    rows.sizes = {6, 2};
    rows.ids_on_device = ids_of({4, bad});
    EXPECT_THROW(bring_ids(rows), c10::IndexError);
    EXPECT_FALSE(rows.ids.defined());
  }
}

} // namespace
} // namespace torchkv

// Rows of a value, through the facade and of a store.
#include "store/row_pull.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "kvstore.h"
#include "store/store.h"

namespace torchkv {
namespace {

TEST(RowPull, RowsOfAValueByTheirNumbers) {
  KVStore store;
  const at::Tensor value = at::arange(12, at::kFloat).view({4, 3});
  store.init(3, value);
  const at::Tensor ids = at::tensor({3, 0, 3}, at::kInt);
  const at::Tensor expected = value.index_select(0, ids);
  EXPECT_TRUE(at::equal(store.row_sparse_pull(3, ids)[0], expected));
  const at::Tensor out = at::zeros({3, 3}, at::kDouble);
  store.row_sparse_pull(3, ids, out);
  EXPECT_TRUE(at::equal(out, expected.to(at::kDouble)));
}

TEST(RowPull, RefusesWhatHasNoSuchRow) {
  KVStore store;
  store.init(3, at::zeros({4, 3}));
  const at::Tensor out = at::ones({1, 3});
  EXPECT_THROW(
      store.row_sparse_pull(3, at::tensor({4}, at::kLong), out),
      c10::IndexError);
  EXPECT_THROW(store.row_sparse_pull(3, at::Tensor(), out), c10::TypeError);
  EXPECT_TRUE(at::equal(out, at::ones({1, 3})));
}

// As where another thread deletes a key and initializes it anew in between.
TEST(RowPull, RefusesAValueThatWasReplacedAfterTheChecks) {
  KVStore store;
  store.init(3, at::zeros({4, 3}));
  const at::Tensor ids = at::tensor({3}, at::kLong);
  const RowPull pull{3, 4, ids, at::ones({1, 3}), {}};
  store.erase(3);
  store.init(3, at::zeros({2, 3}));
  EXPECT_THROW(store.store()->pull_rows("test", pull), c10::ValueError);
  store.erase(3);
  store.init(3, at::zeros({4, 3}, at::kHalf));
  EXPECT_THROW(store.store()->pull_rows("test", pull), c10::ValueError);
  EXPECT_TRUE(at::equal(pull.rows, at::ones({1, 3})));
}

} // namespace
} // namespace torchkv

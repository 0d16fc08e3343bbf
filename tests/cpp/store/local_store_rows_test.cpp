// Row-sparse keys in C++, and by many threads.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/row_sparse.h"
#include "function_updater.h"
#include "kvstore.h"

namespace torchkv {
namespace {

using testing::updater_of;

at::Tensor sparse(
    std::initializer_list<int64_t> ids,
    double value,
    int64_t num_rows = 10) {
  const auto count = static_cast<int64_t>(ids.size());
  return at::sparse_coo_tensor(
      at::tensor(ids, at::kLong).unsqueeze(0),
      at::full({count, 2}, value),
      {num_rows, 2});
}

TEST(LocalStoreRowsTest, KeepsWhatIsPushed) {
  KVStore store;
  store.init_rows("table", {2}, at::kFloat, 10);
  EXPECT_TRUE(store.is_row_sparse("table"));
  store.push("table", Tensors::replicas({sparse({7, 3}, 1), sparse({3}, 2)}));
  EXPECT_EQ(store.num_rows("table"), 2);
  const at::Tensor value = store.pull("table")[0];
  EXPECT_TRUE(at::equal(value._indices()[0], at::tensor({3, 7}, at::kLong)));
  EXPECT_TRUE(
      at::equal(value._values().select(1, 0), at::tensor({3.0F, 1.0F})));
  store.erase_rows("table", at::tensor({3, 9}, at::kLong));
  EXPECT_EQ(store.num_rows("table"), 1);
  const at::Tensor rows =
      store.row_sparse_pull("table", at::tensor({7, 3}, at::kInt))[0];
  EXPECT_TRUE(at::equal(rows.select(1, 1), at::tensor({1.0F, 0.0F})));
}

TEST(LocalStoreRowsTest, RefusesValuesThatItCannotAddUp) {
  struct Other final : Encoding {
    Other() {
      form = "other";
    }
  };
  KVStore store;
  store.init_rows(3, {2}, at::kFloat, 10);
  EXPECT_THROW(
      store.push(
          3, Tensors::encoded(at::ones({10, 2}), std::make_shared<Other>())),
      c10::NotImplementedError);
  EXPECT_THROW(
      store.push(
          3,
          Tensors::encoded(at::ones({10, 2}), std::make_shared<RowSparse>())),
      c10::NotImplementedError);
  EXPECT_THROW(
      store.init(
          5,
          Tensors::encoded(at::ones({10, 2}), std::make_shared<RowSparse>())),
      c10::NotImplementedError);
  EXPECT_EQ(store.num_rows(3), 0);
}

TEST(LocalStoreRowsTest, AnUpdaterMayTakeRows) {
  KVStore store;
  store.init_rows(3, {2}, at::kFloat, 10);
  store.set_updater(updater_of(
      [](const at::Tensor& input, const at::Tensor& stored) {
        stored._values().sub_(input._values());
      },
      /*takes_rows=*/true));
  store.push(3, Tensors::replicas({sparse({7, 3}, 1), sparse({3}, 2)}));
  const at::Tensor value = store.pull(3)[0];
  EXPECT_TRUE(at::equal(value._indices()[0], at::tensor({3, 7}, at::kLong)));
  EXPECT_TRUE(
      at::equal(value._values().select(1, 0), at::tensor({-3.0F, -1.0F})));
  store.set_updater(
      updater_of([](const at::Tensor&, const at::Tensor&) { FAIL(); }));
  EXPECT_THROW(store.push(3, sparse({7}, 1)), c10::NotImplementedError);
}

TEST(LocalStoreRowsTest, ThreadsPushPullDeleteAndSave) {
  KVStore store("device");
  const int64_t num_rows = 300;
  store.init_rows(3, {2}, at::kFloat, num_rows);
  Optimizer optimizer = make_optimizer("test", "sgd", {{"lr", 1}});
  store.set_optimizer(std::move(optimizer));
  static constexpr int64_t num_pushes = 200;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&store, t, num_rows] {
      for (int64_t i = 0; i < num_pushes; ++i) {
        // Rows of its own, and one that all push.
        store.push(3, sparse({1 + t + 3 * (i % 90), 0}, -1, num_rows));
      }
    });
  }
  threads.emplace_back([&store, num_rows] {
    for (int64_t i = 0; i < num_pushes; ++i) {
      store.pull(3, at::empty({num_rows, 2}));
      store.erase_rows(3, at::tensor({num_rows - 1}, at::kLong));
      store.row_sparse_pull(3, at::arange(num_rows, at::kLong));
      KVStore::from_state(store.state());
      store.repr();
    }
  });
  for (auto& thread : threads) {
    thread.join();
  }
  const at::Tensor out = at::empty({num_rows, 2});
  store.pull(3, out);
  EXPECT_EQ(out[0][0].item<double>(), 3 * num_pushes);
  EXPECT_EQ(out.select(1, 0).sum().item<double>(), 6 * num_pushes);
  EXPECT_EQ(store.num_rows(3), 271);
}

} // namespace
} // namespace torchkv

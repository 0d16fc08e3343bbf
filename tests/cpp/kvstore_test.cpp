// The C++ API, as LibTorch programs use it.
#include "kvstore.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "core/errors.h"

namespace torchkv {
namespace {

at::Tensor full(double value) {
  return at::full({2, 3}, value, at::kFloat);
}

void expect_full(const at::Tensor& tensor, double value) {
  EXPECT_TRUE(at::equal(tensor, full(value))) << tensor;
}

// stored += 2 * input, and throws at one key.
class AddTwice final : public OpaqueUpdater {
 public:
  void update(const Key& key, const at::Tensor& input, const at::Tensor& stored)
      override {
    seen.push_back(key);
    stored.add_(input, 2);
    if (key == Key(7)) {
      throw std::logic_error("seven");
    }
    if (inside) {
      inside();
    }
  }
  std::optional<KeyKind> key_kind() const override {
    return KeyKind::kInt;
  }
  at::Tensor serialize() const override {
    return {};
  }

  std::vector<Key> seen;
  std::function<void()> inside;
};

TEST(KVStoreTest, SumsReplicasAndAssigns) {
  const auto store = c10::make_intrusive<KVStore>("local");
  store->init(3, full(2));
  store->push(3, full(8));
  expect_full(store->pull(3)[0], 8);
  store->push(3, Tensors::replicas({full(1), full(1), full(1), full(1)}));
  const std::vector<at::Tensor> outs{full(0), full(0)};
  store->pull(3, Tensors::replicas(outs));
  expect_full(outs[0], 4);
  expect_full(outs[1], 4);
}

TEST(KVStoreTest, ListsOfKeysAndStrKeys) {
  const auto store = c10::make_intrusive<KVStore>("device");
  store->init({"a", "b"}, Tensors::one_each({full(1), full(2)}));
  store->push({"b", "a", "b"}, {{{full(1)}, {full(5)}, {full(10)}}});
  const auto pulled = store->pull({"a", "b"});
  expect_full(pulled[0], 5);
  expect_full(pulled[1], 11);
  EXPECT_EQ(store->keys(), (std::vector<Key>{"a", "b"}));
}

TEST(KVStoreTest, AnUpdaterThatThrowsStopsTheCallAtItsKey) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init({5, 7, 9}, Tensors::one_each({full(0), full(0), full(0)}));
  const auto updater = std::make_shared<AddTwice>();
  store->set_updater(updater);
  const auto ones = Tensors::one_each({full(1), full(1), full(1)});
  EXPECT_THROW(store->push({5, 7, 9}, ones), std::logic_error);
  EXPECT_EQ(updater->seen, (std::vector<Key>{5, 7}));
  const auto pulled = store->pull({5, 7, 9});
  expect_full(pulled[0], 2);
  expect_full(pulled[1], 2);
  expect_full(pulled[2], 0);
  store->push(9, full(1));
  expect_full(store->pull(9)[0], 2);
}

TEST(KVStoreTest, AStoreRejectsCallsFromItsOwnUpdater) {
  const auto store = c10::make_intrusive<KVStore>();
  const auto other = c10::make_intrusive<KVStore>();
  store->init(1, full(0));
  other->init(1, full(0));
  const auto updater = std::make_shared<AddTwice>();
  updater->inside = [&] {
    other->push(1, full(3));
    EXPECT_THROW(store->pull(1), c10::Error);
    EXPECT_THROW(store->set_updater(nullptr), c10::Error);
  };
  store->set_updater(updater);
  store->push(1, full(1));
  expect_full(other->pull(1)[0], 3);
  expect_full(store->pull(1)[0], 2);
}

TEST(KVStoreTest, RejectedCallsChangeNothing) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init({1, 2}, Tensors::one_each({full(1), full(2)}));
  const at::Tensor wrong = at::zeros(4);
  EXPECT_THROW(
      store->push({1, 2}, Tensors::one_each({full(9), wrong})),
      c10::ValueError);
  EXPECT_THROW(
      store->push({1, 3}, Tensors::one_each({full(9), full(9)})),
      UnknownKeyError);
  EXPECT_THROW(store->push({1, 2}, full(9)), c10::ValueError);
  EXPECT_THROW(store->push(1, at::Tensor()), c10::TypeError);
  EXPECT_THROW(store->push(1, Tensors::replicas({})), c10::ValueError);
  EXPECT_THROW(store->push(Keys(), Tensors()), c10::ValueError);
  EXPECT_THROW(store->broadcast(3, full(1), wrong), c10::ValueError);
  EXPECT_FALSE(store->contains(3));
  expect_full(store->pull(1)[0], 1);
  expect_full(store->pull(2)[0], 2);
}

TEST(KVStoreTest, AssignReplacesAllKeysOrNone) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init({1, 2}, Tensors::one_each({full(1), full(2)}));
  store->set_updater(std::make_shared<AddTwice>());
  store->assign({2, 1}, {{{full(20)}, {full(10)}}});
  store->push(1, full(1));
  expect_full(store->pull(1)[0], 12);
  expect_full(store->pull(2)[0], 20);
  EXPECT_THROW(
      store->assign({1, 2}, Tensors::one_each({full(9), at::zeros(4)})),
      c10::ValueError);
  EXPECT_THROW(
      store->assign({1, 3}, Tensors::one_each({full(9), full(9)})),
      UnknownKeyError);
  EXPECT_THROW(
      store->assign({1, 1}, Tensors::one_each({full(9), full(9)})),
      c10::ValueError);
  EXPECT_THROW(
      store->assign(1, Tensors::replicas({full(9), full(9)})), c10::ValueError);
  EXPECT_THROW(store->assign(1, at::Tensor()), c10::TypeError);
  expect_full(store->pull(1)[0], 12);
}

TEST(KVStoreTest, OneMachineIsOneWorker) {
  for (const char* type : {"local", "device"}) {
    const auto store = c10::make_intrusive<KVStore>(type);
    store->barrier();
    EXPECT_EQ(store->rank(), 0);
    EXPECT_EQ(store->num_workers(), 1);
    EXPECT_EQ(store->num_dead_node(), 0);
    store->close();
    EXPECT_THROW(store->barrier(), c10::Error);
    EXPECT_THROW(store->num_dead_node(), c10::Error);
    EXPECT_EQ(store->rank(), 0);
    EXPECT_EQ(store->num_workers(), 1);
  }
}

TEST(KVStoreTest, StateRestoresAnEqualStore) {
  const auto store = c10::make_intrusive<KVStore>("device");
  store->init({5, 3}, Tensors::one_each({full(5), full(3)}));
  store->push(3, full(4));
  const auto copy =
      KVStore::from_state(StoreState::from_tuple(store->state().to_tuple()));
  store->push(3, full(9));
  EXPECT_EQ(copy->type(), "device");
  EXPECT_EQ(copy->keys(), (std::vector<Key>{5, 3}));
  expect_full(copy->pull(3)[0], 4);
  EXPECT_EQ(copy->state().versions, (std::vector<int64_t>{0, 1}));
}

TEST(KVStoreTest, AnInconsistentStateIsRejected) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(5, full(5));
  auto tuple = store->state().to_tuple();
  std::get<3>(tuple).push_back(6); // a key without a value
  EXPECT_THROW(StoreState::from_tuple(tuple), c10::ValueError);
  tuple = store->state().to_tuple();
  std::get<0>(tuple) = 99;
  EXPECT_THROW(StoreState::from_tuple(tuple), c10::ValueError);
}

TEST(KVStoreTest, ACopyKeepsTheKindOfDeletedKeys) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init("w", full(5));
  store->erase("w");
  const auto copy = KVStore::from_state(store->state());
  EXPECT_THROW(copy->init(1, full(1)), c10::TypeError);
}

} // namespace
} // namespace torchkv

// Sharded values on fake GPUs: their devices and streams.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "broken_runtime.h"
#include "devices_test.h"
#include "kvstore.h"
#include "memory/slices.h"
#include "optimizer_helpers.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::counters;
using mock_cuda::cuda;
using mock_cuda::expect_waits_matter;
using mock_cuda::make_store;
using mock_cuda::num_nccl_operations;
using mock_cuda::PlacesOfEnvironment;

using ShardedStreamsTest = mock_cuda::DevicesTest;

std::vector<at::Tensor> on_devices(int64_t size, int num_devices) {
  std::vector<at::Tensor> result;
  for (int i = 0; i < num_devices; ++i) {
    result.push_back(at::ones({size}, at::device(cuda(i))));
  }
  return result;
}

TEST_F(ShardedStreamsTest, EachDeviceHasAShareOfTheLaunches) {
  const auto store = make_store();
  store->init(3, at::zeros({1 << 20}, at::device(cuda(0))));
  const auto values = on_devices(1 << 20, 4);
  store->push(3, Tensors::replicas(values));
  const auto before = counters();
  store->push(3, Tensors::replicas(values));
  EXPECT_EQ(counters().launches - before.launches, 4);
  // One home waits for the three others, and they for it, twice.
  EXPECT_EQ(counters().waits - before.waits, 4 * 3);
}

int64_t launches_of_push(KVStore& store, const Key& key, int64_t size) {
  const auto values = on_devices(size, 4);
  store.push(key, Tensors::replicas(values)); // places the key
  const auto before = counters().launches;
  store.push(key, Tensors::replicas(values));
  return counters().launches - before;
}

TEST_F(ShardedStreamsTest, ValuesOfALoadedStoreAreSharded) {
  const auto store = make_store();
  store->init(1, at::zeros({1 << 20}, at::device(cuda(0))));
  const auto loaded = make_store();
  loaded->init(3, at::zeros({1 << 20}, at::device(cuda(0))));
  store->take(*loaded);
  EXPECT_EQ(launches_of_push(*store, 3, 1 << 20), 4);
}

TEST_F(ShardedStreamsTest, DeletedKeysAreNotCounted) {
  const auto store = make_store();
  for (int i = 0; i < 10; ++i) {
    store->init(1, at::zeros({1 << 20}, at::device(cuda(0))));
    store->erase(1);
  }
  store->init(3, at::zeros({1 << 20}, at::device(cuda(0))));
  EXPECT_EQ(launches_of_push(*store, 3, 1 << 20), 4);
}

// Notes on which device each key's value is.
class NoteHomes final : public OpaqueUpdater {
 public:
  void update(
      const Key& /*key*/,
      const at::Tensor& /*input*/,
      const at::Tensor& stored) override {
    ++num_keys[stored.device().index()];
  }
  std::optional<KeyKind> key_kind() const override {
    return std::nullopt;
  }
  at::Tensor serialize() const override {
    return {};
  }

  std::map<int, int> num_keys; // by device
};

// Wherever they were placed or sharded before.
TEST_F(ShardedStreamsTest, AnUpdatersWholeValuesAreDistributed) {
  for (const auto* type : {"device", "nccl"}) {
    for (const bool was_cut : {false, true}) {
      const auto store = make_store(type);
      const Keys keys = mock_cuda::first_keys(8);
      Tensors values;
      for (int64_t i = 0; i < 8; ++i) {
        store->init(i, at::zeros({1 << 18}, at::device(cuda(0))));
        for (const auto& value : on_devices(1 << 18, 4)) {
          values.append(value);
        }
        values.end_group();
      }
      if (was_cut) {
        store->push(keys, values);
      }
      const auto updater = std::make_shared<NoteHomes>();
      store->set_updater(updater);
      for (int round = 1; round <= 2; ++round) {
        store->push(keys, values);
        EXPECT_EQ(updater->num_keys.size(), 4) << type << was_cut;
        for (const auto& [device, count] : updater->num_keys) {
          EXPECT_EQ(count, 2 * round) << type << was_cut << device;
        }
      }
    }
  }
}

TEST_F(ShardedStreamsTest, NcclFillsTheHomesOutBesideAnUnsupportedOne) {
  const auto store = make_store("nccl");
  store->init(3, at::ones({2, 5}, at::device(cuda(0))));
  const at::Tensor at_home = at::zeros({2, 5}, at::device(cuda(0)));
  for (const at::Tensor& other :
       {at::zeros({2, 5}, at::device(cuda(1)).dtype(at::kDouble)),
        at::zeros({5, 2}, at::device(cuda(1))).t()}) {
    at_home.zero_();
    store->pull(3, Tensors::replicas({at_home, other}));
    EXPECT_TRUE(at_home.cpu().eq(1).all().item<bool>());
    EXPECT_TRUE(other.cpu().eq(1).all().item<bool>());
  }
}

TEST_F(ShardedStreamsTest, NcclScattersAndGathersEvenShards) {
  const auto store = make_store("nccl");
  store->init(3, at::zeros({1 << 20}));
  store->init(5, at::zeros({(1 << 20) + 3})); // the last shard is smaller
  store->init(7, at::zeros({10}));
  const auto run = [&](int64_t key, int64_t size) {
    const auto values = on_devices(size, 4);
    store->push(key, Tensors::replicas(values)); // places the key
    const int before = num_nccl_operations();
    store->push(key, Tensors::replicas(values));
    const int pushed = num_nccl_operations();
    store->pull(key, Tensors::replicas(values));
    for (const auto& value : values) {
      EXPECT_TRUE(value.cpu().eq(4).all().item<bool>());
    }
    return std::tuple(pushed - before, num_nccl_operations() - pushed);
  };
  EXPECT_EQ(run(3, 1 << 20), std::tuple(1, 1));
  EXPECT_EQ(run(5, (1 << 20) + 3), std::tuple(4, 4));
  EXPECT_EQ(run(7, 10), std::tuple(1, 1));
}

// A gradient is overwritten on its own device right after the push.
TEST_F(ShardedStreamsTest, MissingWaitsAreDetected) {
  expect_waits_matter([](Runtime& runtime) {
    const auto store = make_store("device", runtime);
    store->init(3, at::zeros({1 << 20}, at::device(cuda(0))));
    const auto values = on_devices(1 << 20, 2);
    store->push(3, Tensors::replicas(values));
    values[1].fill_(2);
    store->pull(3, Tensors::replicas(values));
    values[0].add_(1);
  });
}

// The streams of places on one device, too.
TEST_F(ShardedStreamsTest, PlacesOfOneDeviceWaitForItsStream) {
  const PlacesOfEnvironment places("cuda:0,cuda:0");
  expect_waits_matter([](Runtime& runtime) {
    const auto store = make_store("device", runtime);
    store->init(3, at::zeros({64}, at::device(cuda(0))));
    const std::vector<at::Tensor> values(
        2, at::ones({64}, at::device(cuda(0))));
    store->push(3, Tensors::replicas(values));
    values[0].fill_(2);
  });
}

} // namespace
} // namespace torchkv

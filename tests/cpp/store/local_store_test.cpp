// What a LocalStore offers to servers that hold one: apply, an allocator of
// values, leases, and norms that are combined with those of other stores.
#include "store/local_store.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "error_text.h"
#include "function_updater.h"
#include "optimizer_helpers.h"

namespace torchkv {
namespace {

using testing::expect_equal;
using testing::optimizer;
using testing::updater_of;

LocalStore::Options sharded() {
  LocalStore::Options options;
  options.policy = Placement::Policy::kShardAll;
  options.places = "cpu,cpu,cpu";
  return options;
}

at::Tensor value_of(LocalStore& store, const Key& key = 1) {
  return store.pull(key, {})[0];
}

void init(LocalStore& store, const Keys& keys, const Tensors& values) {
  (void)store.insert({"init", keys, &values});
}

void push(LocalStore& store, const Keys& keys, const Tensors& values) {
  (void)store.merge({"push", keys, &values});
}

void assign(LocalStore& store, const Keys& keys, const Tensors& values) {
  store.assign({"assign", keys, &values});
}

// A push or, with outs, a pushpull.
void apply(
    LocalStore& store,
    const Keys& keys,
    const Tensors& values,
    const Updater& updater,
    const Tensors* outs = nullptr) {
  (void)store.apply({"push", keys, &values, outs}, updater);
}

Tensors replicas(double value, int count = 3) {
  return Tensors::replicas(
      std::vector<at::Tensor>(count, at::full(24, value, at::kFloat)));
}

// --- apply
// -------------------------------------------------------------------------

TEST(LocalStoreApplyTest, UsesTheUpdaterOfItsRound) {
  LocalStore store(default_runtime(), {});
  init(store, {1, 2}, Tensors::one_each({at::zeros(2), at::zeros(2)}));
  const auto sgd = [](double lr) {
    return optimizer("sgd", {{"lr", lr}, {"momentum", 0.5}});
  };
  store.set_optimizer(sgd(1), /*keep_state=*/false, true);
  const Updater round = store.updater();
  store.set_optimizer(sgd(10), /*keep_state=*/false, true);
  push(store, 1, at::ones(2));
  const Tensors ones = Tensors::one_each({at::ones(2), at::ones(2)});
  Tensors outs = Tensors::one_each({at::empty(2), at::empty(2)});
  apply(store, {1, 2}, ones, round, &outs);
  // The new optimizer has updated key 1 already, so it steps with that.
  expect_equal(outs.flat[0], at::full(2, -10.F - 15.F));
  expect_equal(outs.flat[1], at::full(2, -1.F));
  apply(store, 2, at::ones(2), round);
  expect_equal(value_of(store, 2), at::full(2, -1.F - 1.5F));
  // Key 2 has the old one's state until the new one steps.
  push(store, 2, at::ones(2));
  expect_equal(value_of(store, 2), at::full(2, -12.5F));
  EXPECT_EQ(store.optimizer_states(2)[0].step, 1);
}

TEST(LocalStoreApplyTest, AssignsAndRunsOpaqueUpdaters) {
  LocalStore store(default_runtime(), {});
  init(store, 1, at::zeros(2));
  store.set_optimizer(optimizer("sgd", {{"lr", 1}}), false, true);
  apply(store, 1, at::ones(2), {});
  expect_equal(value_of(store), at::ones(2));
  const Updater twice =
      updater_of([](auto& input, auto& stored) { stored.add_(input, 2); });
  Tensors outs = Tensors::one_each({at::empty(2), at::empty(2)});
  // A repeated key is one update.
  apply(
      store,
      {1, 1},
      Tensors::one_each({at::ones(2), at::ones(2)}),
      twice,
      &outs);
  expect_equal(outs.flat[0], at::full(2, 5.F));
  expect_equal(outs.flat[1], at::full(2, 5.F));
  apply(store, 1, at::ones(2), twice);
  expect_equal(value_of(store), at::full(2, 7.F));
  // Neither has become the store's.
  push(store, 1, at::ones(2));
  expect_equal(value_of(store), at::full(2, 6.F));
  EXPECT_EQ(store.lease(1).second, 4);
}

TEST(LocalStoreApplyTest, ChecksEverythingFirst) {
  LocalStore store(default_runtime(), {});
  init(store, {1, 2}, Tensors::one_each({at::zeros(2), at::zeros(2)}));
  const Tensors ones = Tensors::one_each({at::ones(2), at::ones(2)});
  const Tensors wrong = Tensors::one_each({at::empty(2), at::empty(3)});
  EXPECT_THROW(apply(store, {1, 2}, ones, {}, &wrong), c10::ValueError);
  EXPECT_THROW(apply(store, {1, 2}, wrong, {}), c10::ValueError);
  EXPECT_THROW(apply(store, {1, 3}, ones, {}), c10::IndexError);
  for (const int key : {1, 2}) {
    expect_equal(value_of(store, key), at::zeros(2));
  }
}

// --- The allocator
// -------------------------------------------------------------------------

// Where stored values must be.
class Arena {
 public:
  Allocator allocator() {
    return [this](auto sizes, auto strides, auto dtype, auto device) {
      at::Tensor result =
          at::empty_strided(sizes, strides, at::device(device).dtype(dtype));
      tensors_.emplace_back(result.getIntrusivePtr());
      return result;
    };
  }
  // Elements in memory that is in use.
  int64_t num_elements() const {
    int64_t result = 0;
    for (const auto& tensor : tensors_) {
      const auto alive = tensor.lock();
      result += alive.defined() ? alive->numel() : 0;
    }
    return result;
  }
  int64_t num_tensors() const {
    return std::count_if(tensors_.begin(), tensors_.end(), [](auto& tensor) {
      return !tensor.expired();
    });
  }
  bool has(const at::Tensor& tensor) const {
    return std::any_of(tensors_.begin(), tensors_.end(), [&](auto& own) {
      const auto alive = own.lock();
      return alive.defined() && alive->storage().is_alias_of(tensor.storage());
    });
  }

 private:
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> tensors_;
};

TEST(LocalStoreAllocatorTest, HasAllStoredValues) {
  Arena arena;
  LocalStore::Options options = sharded();
  options.allocator = arena.allocator();
  LocalStore store(default_runtime(), std::move(options));
  const auto expect_values = [&](int64_t num_tensors, double value) {
    EXPECT_EQ(arena.num_elements(), 2 * 24); // of all, and nothing else
    EXPECT_EQ(arena.num_tensors(), num_tensors);
    for (const int key : {1, 2}) {
      expect_equal(value_of(store, key), at::full(24, value, at::kFloat));
    }
  };
  const Keys keys{1, 2};
  init(store, keys, Tensors::one_each({at::zeros(24), at::zeros(24)}));
  expect_values(2, 0);
  store.set_optimizer(
      optimizer("sgd", {{"lr", 1}, {"momentum", 0.5}}), false, true);
  Tensors values;
  for (int i = 0; i < 2 * 3; ++i) {
    values.append(at::ones(24));
    if (i % 3 == 2) {
      values.end_group();
    }
  }
  push(store, keys, values);
  const int64_t num_shards = arena.num_tensors();
  EXPECT_GT(num_shards, 2);
  expect_values(num_shards, -3);
  assign(store, keys, Tensors::one_each({at::ones(24), at::ones(24)}));
  expect_values(num_shards, 1);
  store.set_updater(
      updater_of([](auto& input, auto& stored) { stored.add_(input); }));
  push(store, keys, values);
  expect_values(2, 4);
  store.set_updater(nullptr);
  push(store, keys, values);
  EXPECT_GT(arena.num_tensors(), 2);
  expect_values(arena.num_tensors(), 3);
  LocalStore other(default_runtime(), {});
  init(other, 3, at::ones(24));
  store.erase(keys);
  EXPECT_EQ(arena.num_tensors(), 0);
}

TEST(LocalStoreAllocatorTest, UpdatersWorkAsWithoutIt) {
  for (const bool has_allocator : {false, true}) {
    SCOPED_TRACE(has_allocator);
    Arena arena;
    LocalStore::Options options;
    if (has_allocator) {
      options.allocator = arena.allocator();
    }
    LocalStore store(default_runtime(), std::move(options));
    init(store, 1, at::zeros(24));
    const auto expect_stored = [&](double value) {
      expect_equal(value_of(store), at::full(24, value, at::kFloat));
    };
    at::Tensor kept;
    store.set_updater(updater_of([&](auto& input, auto& stored) {
      stored.add_(input);
      kept = stored;
    }));
    push(store, 1, at::ones(24));
    expect_stored(1);
    expect_equal(kept, at::ones(24));
    store.set_updater(updater_of([](auto& /*input*/, auto& stored) {
      stored.zero_();
      TORCH_CHECK(false, "thrown by the updater");
    }));
    EXPECT_THROW(push(store, 1, at::ones(24)), c10::Error);
    expect_stored(0);
    store.set_updater(updater_of([](auto& /*input*/, auto& stored) {
      stored.set_data(at::full(24, 7.F));
    }));
    EXPECT_THROW(push(store, 1, at::ones(24)), c10::Error);
    expect_stored(0);
    store.set_updater(nullptr);
    push(store, 1, at::ones(24));
    expect_equal(value_of(store), at::ones(24));
  }
}

// --- Leases
// -------------------------------------------------------------------------

// The ways to change a value.
struct Write {
  const char* name;
  std::function<void(LocalStore& store)> prepare;
  std::function<void(LocalStore& store)> write;
};

std::vector<Write> all_writes() {
  const auto push_ones = [](LocalStore& store) {
    push(store, 1, at::ones(24));
  };
  const auto set = [](Optimizer optimizer) {
    return [optimizer](LocalStore& store) {
      store.set_optimizer(optimizer, false, true);
    };
  };
  return {
      {"push", [](LocalStore&) {}, push_ones},
      {"sgd", set(optimizer("sgd", {{"lr", 1}, {"momentum", 0.5}})), push_ones},
      {"lamb", set(optimizer("lamb", {{"lr", 1}})), push_ones},
      {"opaque",
       [](LocalStore& store) {
         store.set_updater(
             updater_of([](auto& input, auto& stored) { stored.add_(input); }));
       },
       push_ones},
      {"pushpull",
       [](LocalStore&) {},
       [](LocalStore& store) {
         const Tensors ones(at::ones(24));
         const Tensors out(at::empty(24));
         (void)store.merge({"pushpull", 1, &ones, &out});
       }},
      {"apply",
       [](LocalStore&) {},
       [](LocalStore& store) { apply(store, 1, at::ones(24), {}); }},
      {"assign",
       [](LocalStore&) {},
       [](LocalStore& store) { assign(store, 1, at::ones(24)); }},
      {"delete and init",
       [](LocalStore&) {},
       [](LocalStore& store) {
         store.erase(1);
         init(store, 1, at::ones(24));
       }}};
}

TEST(LocalStoreLeaseTest, NoWriteChangesALeasedTensor) {
  for (const bool has_allocator : {false, true}) {
    for (const auto& [name, prepare, write] : all_writes()) {
      SCOPED_TRACE(name);
      Arena arena;
      LocalStore::Options options;
      if (has_allocator) {
        options.allocator = arena.allocator();
      }
      LocalStore store(default_runtime(), std::move(options));
      init(store, 1, at::full(24, 5.F));
      prepare(store);
      const auto [leased, version] = store.lease(1);
      const at::Tensor part = store.lease(1).first.narrow(0, 3, 4);
      write(store);
      expect_equal(leased, at::full(24, 5.F));
      expect_equal(part, at::full(4, 5.F));
      const auto [next, next_version] = store.lease(1);
      EXPECT_FALSE(next.equal(leased));
      expect_equal(next, value_of(store));
      EXPECT_EQ(arena.has(next), has_allocator);
      EXPECT_EQ(version, 0);
      EXPECT_EQ(next_version, name == std::string("delete and init") ? 0 : 1);
    }
  }
}

TEST(LocalStoreLeaseTest, MemoryIsTheStoresAgainAfterwards) {
  LocalStore store(default_runtime(), {});
  init(store, 1, at::zeros(24));
  const void* memory = nullptr;
  for (int i = 0; i < 4; ++i) {
    {
      const at::Tensor leased = store.lease(1).first;
      EXPECT_TRUE(memory == nullptr || memory == leased.const_data_ptr());
      memory = leased.const_data_ptr();
    }
    push(store, 1, at::full(24, i, at::kFloat));
  }
  // A view of a leased tensor is one, too.
  const at::Tensor view = store.lease(1).first.view({4, 6});
  push(store, 1, at::full(24, 9.F));
  const at::Tensor moved = store.lease(1).first;
  EXPECT_NE(moved.const_data_ptr(), memory);
  expect_equal(moved, at::full(24, 9.F));
  expect_equal(view, at::full({4, 6}, 3.F));
}

TEST(LocalStoreLeaseTest, OfAShardedValueIsACopy) {
  LocalStore store(default_runtime(), sharded());
  init(store, 1, at::zeros(24));
  push(store, 1, replicas(1));
  auto [leased, version] = store.lease(1);
  EXPECT_EQ(version, 1);
  push(store, 1, replicas(2));
  expect_equal(leased, at::full(24, 3.F));
  expect_equal(value_of(store), at::full(24, 6.F));
  // One that the next call shards.
  init(store, 2, at::zeros(24));
  leased = store.lease(2).first;
  push(store, 2, replicas(1));
  expect_equal(leased, at::zeros(24));
}

// Values and versions are of one moment, and no value is half of another.
TEST(LocalStoreLeaseTest, OfOneThreadWhileAnotherPushes) {
  constexpr int kPushes = 2000;
  LocalStore store(default_runtime(), {});
  init(store, 1, at::zeros(1000));
  std::atomic<bool> is_done{false};
  std::atomic<int> num_errors{0};
  const auto read = [&] {
    int64_t last = 0;
    while (!is_done || last != kPushes) {
      const auto [leased, version] = store.lease(1);
      const auto* const elements = leased.const_data_ptr<float>();
      const bool is_whole = std::all_of(
          elements, elements + 1000, [version = version](float element) {
            return element == static_cast<float>(version);
          });
      num_errors += !is_whole || version < last ? 1 : 0;
      last = version;
    }
  };
  std::thread first(read);
  std::thread second(read);
  for (int i = 1; i <= kPushes; ++i) {
    push(store, 1, at::full(1000, i, at::kFloat));
  }
  is_done = true;
  first.join();
  second.join();
  EXPECT_EQ(num_errors, 0);
}

// --- Combined norms
// -------------------------------------------------------------------------

// Adds the numbers of two threads: both get the sum.
class SumOfTwo {
 public:
  double add(double number) {
    std::unique_lock lock(mutex_);
    const int64_t round = count_ / 2;
    pending_ = count_ % 2 == 0 ? number : pending_ + number;
    if (++count_ % 2 == 0) {
      sum_ = pending_;
      changed_.notify_all();
    }
    EXPECT_TRUE(changed_.wait_for(
        lock, std::chrono::seconds(60), [&] { return count_ / 2 > round; }));
    return sum_;
  }
  int64_t count() const {
    return count_;
  }

 private:
  std::mutex mutex_; // guards the rest
  std::condition_variable changed_;
  int64_t count_ = 0;
  double pending_ = 0;
  double sum_ = 0;
};

// Keys 1 and 2 of a store are each in a store of its own.
void expect_same_as_one_store(const NumbersByName& gradient) {
  const auto rule = optimizer("sgd", {{"lr", 1}, {"momentum", 0.5}}, gradient);
  LocalStore whole(default_runtime(), {});
  init(whole, {1, 2}, Tensors::one_each({at::zeros(3), at::zeros(4)}));
  whole.set_optimizer(rule, false, true);
  SumOfTwo sum;
  std::vector<std::unique_ptr<LocalStore>> halves(2);
  for (int64_t i = 0; i < 2; ++i) {
    LocalStore::Options options;
    auto& store = halves[static_cast<size_t>(i)];
    options.combine = [&, i](double squared_norm) {
      (void)value_of(*store, 1 + i); // nothing is locked
      return sum.add(squared_norm);
    };
    store = std::make_unique<LocalStore>(default_runtime(), std::move(options));
    init(*store, 1 + i, at::zeros(3 + i));
    store->set_optimizer(rule, false, true);
  }
  // Exact sums of squares, whatever the order; one is of infinite gradients.
  const std::vector<double> numbers{2, 4, 1, INFINITY, 1e30};
  for (const double number : numbers) {
    const auto gradient_of = [&](int64_t key) {
      return at::full(2 + key, key == 1 ? number : 3, at::kFloat);
    };
    push(whole, {1, 2}, Tensors::one_each({gradient_of(1), gradient_of(2)}));
    std::thread first([&] { push(*halves[0], 1, gradient_of(1)); });
    push(*halves[1], 2, gradient_of(2));
    first.join();
    for (int64_t key = 1; key <= 2; ++key) {
      auto& half = *halves[static_cast<size_t>(key - 1)];
      expect_equal(value_of(half, key), value_of(whole, key));
      EXPECT_EQ(half.status().grad_norm, whole.status().grad_norm);
      EXPECT_EQ(half.status().num_skipped, whole.status().num_skipped);
    }
  }
  EXPECT_GE(sum.count(), static_cast<int64_t>(2 * numbers.size()));
}

TEST(LocalStoreCombineTest, ClipsByTheNormOfAllStores) {
  expect_same_as_one_store({{"max_norm", 2}, {"skip_nonfinite", 1}});
  expect_same_as_one_store(
      {{"max_norm", 2}, {"skip_nonfinite", 1}, {"clip_value", 3}});
}

TEST(LocalStoreCombineTest, SkipsWhereAnyGradientIsNotFinite) {
  expect_same_as_one_store({{"skip_nonfinite", 1}});
}

TEST(LocalStoreCombineTest, IsNotAskedWithoutANorm) {
  LocalStore::Options options;
  options.combine = [](double squared_norm) {
    ADD_FAILURE() << "there is no norm";
    return squared_norm;
  };
  LocalStore store(default_runtime(), std::move(options));
  init(store, 1, at::zeros(3));
  store.set_optimizer(optimizer("sgd", {{"lr", 1}}), false, true);
  push(store, 1, at::ones(3));
  expect_equal(value_of(store), at::full(3, -1.F));
}

} // namespace
} // namespace torchkv

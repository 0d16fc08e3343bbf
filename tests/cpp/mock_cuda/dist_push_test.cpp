// Values on fake GPUs, pushed to a store of several processes, here of one:
// they are summed on their devices, and leave the process when they have been
// copied, while the caller goes on.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "device/work.h"
#include "devices_test.h"
#include "dist/byte_counts.h"
#include "error_text.h"
#include "stores.h"
#include "wrapped_runtime.h"

namespace torchkv {
namespace {

using mock_cuda::counters;
using mock_cuda::cuda;
using mock_cuda::full;
using mock_cuda::make_optimizer;
using mock_cuda::new_stream;
using mock_cuda::pull_async;
using mock_cuda::push_async;
using mock_cuda::StorePtr;
using testing::error_text;

constexpr int64_t kMany = 100'000; // elements: several messages

class MapRendezvous final : public Rendezvous {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  std::optional<std::string> get(const std::string& key, double /*timeout*/)
      override {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard lock(mutex_);
    return numbers_[key] += amount;
  }
  std::string set_once(const std::string& key, const std::string& value)
      override {
    const std::lock_guard lock(mutex_);
    return values_.try_emplace(key, value).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> numbers_;
};

// Devices that are slow, or broken: the host waits for them until open().
class GatedRuntime final : public testing::WrappedRuntime {
 public:
  void synchronize(RuntimeEvent& event) override {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return is_open_; });
    }
    if (fails) {
      throw std::runtime_error("the bus is on fire");
    }
    WrappedRuntime::synchronize(event);
  }
  void set_open(bool is_open) {
    {
      const std::lock_guard lock(mutex_);
      is_open_ = is_open;
    }
    changed_.notify_all();
  }

  std::atomic<bool> fails{false};

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = true;
};

class DistPushTest : public mock_cuda::DevicesTest {
 protected:
  // Of a name of its own: the process has one node for all.
  StorePtr make_store(double timeout = 30) {
    static auto rendezvous = std::make_shared<MapRendezvous>();
    static int number = 0;
    StoreOptions options;
    options.name = std::to_string(++number);
    options.rank = 0;
    options.world_size = 1;
    options.rendezvous = rendezvous;
    options.timeout = timeout;
    return c10::make_intrusive<KVStore>("dist_sync", options, runtime_);
  }

  static at::Tensor many(double value, c10::Device device = c10::kCPU) {
    return at::full({kMany}, value, at::device(device).dtype(at::kFloat));
  }

  static void expect_value(KVStore& store, const Key& key, double value) {
    const at::Tensor out = store.pull(key)[0];
    EXPECT_TRUE(at::equal(out, at::full_like(out, value)))
        << key.context() << ' ' << out.flatten()[0] << ' ' << value;
  }

  GatedRuntime runtime_;
};

// Whichever thread and stream waits for it.
TEST_F(DistPushTest, AnAsynchronousPullWritesAfterEarlierWorkOfTheCaller) {
  const auto store = make_store();
  store->init(1, many(3));
  const c10::Stream side = new_stream(cuda(0));
  const at::Tensor out = many(1, cuda(0));
  at::Tensor read;
  WorkPtr work;
  mock_cuda::order(mock_cuda::current_stream(cuda(0)), side);
  {
    const c10::StreamGuard guard(side);
    read = out.add(1);
    work = pull_async(*store, 1, out);
  }
  work->wait();
  EXPECT_TRUE(at::equal(out.cpu(), many(3)));
  mock_cuda::order(side, mock_cuda::current_stream(cuda(0)));
  EXPECT_TRUE(at::equal(read.cpu(), many(2)));
}

// The store's thread pins memory and waits for the GPU meanwhile.
TEST_F(DistPushTest, AnotherThreadMayCaptureAGraphDuringAPull) {
  const auto store = make_store();
  store->init(1, many(3));
  const at::Tensor out = many(1, cuda(0));
  const c10::Stream stream = new_stream(cuda(1));
  mock_cuda::begin_capture(stream);
  const auto future = pull_async(*store, 1, out)->get_future();
  future->wait();
  EXPECT_FALSE(future->hasError());
  EXPECT_EQ(mock_cuda::refusal([&] { mock_cuda::end_capture(stream); }), "");
  EXPECT_TRUE(at::equal(out.cpu(), many(3)));
}

TEST_F(DistPushTest, AnUnusedDeviceGetsNoContext) {
  const auto store = make_store();
  store->init(1, many(0));
  const at::Tensor value = many(1, cuda(1));
  EXPECT_EQ(
      mock_cuda::refusal([&] {
        store->push(1, value);
        store->pull(1, value);
        pull_async(*store, 1, value)->wait();
      }),
      "");
  EXPECT_TRUE(at::equal(value.cpu(), many(1)));
}

TEST_F(DistPushTest, ValuesOfAnyDevicesAreSummed) {
  const auto store = make_store();
  const Keys keys{1, 2, 3, 4, 5};
  store->init(
      keys,
      Tensors::one_each({full(0), many(0), full(0), full(0), at::empty({0})}));
  store->set_optimizer("sgd", {{"lr", 1}}); // subtracts the sums
  for (int step = 1; step <= 3; ++step) {
    std::vector<std::vector<at::Tensor>> values{
        {full(1, cuda(0))},
        {many(1, cuda(1)), many(2, cuda(0)), many(3)},
        {full(5)},
        {full(1, cuda(2)), full(2, cuda(2)), full(3, cuda(3))},
        {at::empty({0}, at::device(cuda(1)))}};
    store->push(keys, values);
    for (const auto& of_key : values) {
      for (const auto& value : of_key) {
        value.fill_(100); // the sums are not the caller's memory
      }
    }
    expect_value(*store, 1, -step);
    expect_value(*store, 2, -6 * step);
    expect_value(*store, 3, -5 * step);
    expect_value(*store, 4, -6 * step);
  }
  store->close();
}

TEST_F(DistPushTest, AKeyInOneCallTwiceAndItsFormsInTurn) {
  const auto store = make_store();
  store->init("w", full(0));
  store->set_optimizer("sgd", {{"lr", 1}});
  const Keys twice{"w", "w"};
  store->push(twice, Tensors::one_each({full(1, cuda(0)), full(2, cuda(1))}));
  expect_value(*store, "w", -3);
  store->push("w", full(1)); // on the CPU
  store->push("w", full(1, cuda(0)).to(at::kHalf));
  store->push("w", Tensors::replicas({full(1, cuda(0)), full(1)}));
  store->push("w", full(0, cuda(2)).add_(1).t().contiguous().t());
  expect_value(*store, "w", -8);
  store->erase("w");
  store->init("w", many(0));
  store->push("w", Tensors::replicas({many(1, cuda(0)), many(2, cuda(1))}));
  expect_value(*store, "w", -3);
  store->close();
}

TEST_F(DistPushTest, SumsAreOrderedWithTheCallersStream) {
  const auto store = make_store();
  store->init("w", full(0));
  const c10::StreamGuard guard(new_stream(cuda(0)));
  const at::Tensor value = full(0, cuda(0));
  value.fill_(4);
  store->push("w", value);
  value.fill_(9);
  expect_value(*store, "w", 4);
  store->close();
}

TEST_F(DistPushTest, PulledValuesReachDevices) {
  const auto store = make_store();
  store->init("w", many(2));
  std::vector<at::Tensor> outs{many(0, cuda(0)), many(0), many(0, cuda(3))};
  store->pushpull("w", many(5, cuda(1)), Tensors::replicas(outs));
  for (const auto& out : outs) {
    EXPECT_TRUE(at::equal(out.cpu(), many(5)));
  }
  pull_async(*store, "w", many(0, cuda(2)))->wait();
  store->close();
}

TEST_F(DistPushTest, PulledValuesArePinnedOnceForAllDevices) {
  const auto store = make_store();
  store->init({"w", "v"}, Tensors::one_each({many(2), many(3)}));
  const auto joined = [] { return dist::byte_counts().joined.load(); };
  const int64_t before = joined();
  Tensors outs;
  for (int key = 0; key < 2; ++key) {
    outs.append(many(0, cuda(0)));
    outs.append(many(0, cuda(3)));
    outs.end_group();
  }
  counters() = {};
  store->pull({"w", "v"}, outs);
  EXPECT_EQ(joined() - before, 2 * kMany * 4);
  // Of each device, for both keys together.
  EXPECT_EQ(counters().synchronizations, 2);
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(at::equal(outs.flat[i].cpu(), many(i < 2 ? 2 : 3)));
  }
  // Of another dtype.
  const at::Tensor half =
      at::zeros({kMany}, at::device(cuda(1)).dtype(at::kHalf));
  store->pull("w", half);
  EXPECT_TRUE(at::equal(half.cpu(), many(2).to(at::kHalf)));
  store->close();
}

// Of a large value, parts are pinned one after the other.
TEST_F(DistPushTest, ALargeValueIsNotPinnedAsAWhole) {
  const auto store = make_store();
  constexpr int64_t kLarge = (21LL << 20U) + 3; // 84 MiB
  const at::Tensor value = at::arange(kLarge, at::kFloat);
  store->init("w", value);
  Tensors outs;
  for (const int device : {0, 1}) {
    outs.append(at::zeros({kLarge}, cuda(device)));
  }
  outs.end_group();
  counters() = {};
  store->pull("w", outs);
  // Of both devices, with four parts and with the rest.
  EXPECT_EQ(counters().synchronizations, 4);
  for (const auto& out : outs.flat) {
    EXPECT_TRUE(at::equal(out.cpu(), value));
  }
  store->close();
}

TEST_F(DistPushTest, PushesDoNotWaitForDevices) {
  const auto store = make_store();
  store->init({"w", "v"}, Tensors::one_each({full(0), full(0)}));
  store->set_optimizer("sgd", {{"lr", 1}});
  counters() = {};
  runtime_.set_open(false);
  store->push("w", full(1, cuda(0)));
  const auto work = push_async(*store, "w", full(2)); // after that one
  const auto pulled = full(0);
  const auto pull = pull_async(*store, "w", pulled);
  EXPECT_EQ(counters().synchronizations, 0);
  EXPECT_FALSE(work->is_completed());
  EXPECT_FALSE(pull->is_completed());
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    runtime_.set_open(true);
  });
  store->barrier();
  opener.join();
  pull->wait();
  work->wait();
  EXPECT_TRUE(at::equal(pulled, full(-3)));
  expect_value(*store, "w", -3);
  store->close();
}

// Of what has been summed on devices: the bits of a store on one machine that
// gets the sums from the CPU.
TEST_F(DistPushTest, SumsOfDevicesAreCompressed) {
  for (const char* name : {"1bit", "2bit", "fp16", "fp8", "int4", "topk"}) {
    const auto store = make_store();
    const auto plain = c10::make_intrusive<KVStore>("device");
    const Keys keys{1, 2};
    for (const auto& each : {store, plain}) {
      each->init(keys, Tensors::one_each({full(0), many(0)}));
      each->set_gradient_compression(name);
    }
    const at::Tensor some = at::linspace(-1, 1, kMany);
    for (int step = 1; step <= 3; ++step) {
      const at::Tensor first = full(0.3 * step, cuda(0));
      const at::Tensor second = (some * step).to(cuda(1));
      store->push(
          keys,
          Tensors(
              std::vector<std::vector<at::Tensor>>{
                  {first}, {second, second.to(cuda(2)), many(0.25)}}));
      const at::Tensor sum = some * step + some * step + many(0.25);
      plain->push(keys, Tensors::one_each({full(0.3 * step), sum}));
      for (const auto& value : {first, second}) {
        value.fill_(100);
      }
      for (const auto& key : keys.list) {
        EXPECT_TRUE(at::equal(store->pull(key)[0], plain->pull(key)[0]))
            << name << ' ' << key.context();
      }
    }
    store->close();
  }
}

TEST_F(DistPushTest, ValuesAreCompressedInTheOrderOfTheCalls) {
  const auto store = make_store();
  store->init("w", many(0));
  store->set_gradient_compression("2bit", {{"threshold", 0.5}});
  runtime_.set_open(false);
  store->push("w", many(0.375, cuda(0))); // is queued, and then sends nothing
  const at::Tensor value = many(0.25);
  const at::Tensor pulled = many(9);
  store->push("w", value); // with the rest of that one
  const auto pull = pull_async(*store, "w", pulled);
  value.fill_(100);
  runtime_.set_open(true);
  pull->wait();
  EXPECT_TRUE(at::equal(pulled, many(0.5)));
  store->close();
}

TEST_F(DistPushTest, CloseWaitsForThePushesBeforeIt) {
  runtime_.set_open(false);
  auto store = make_store();
  store->init("w", full(0));
  store->push("w", full(1, cuda(0)));
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    runtime_.set_open(true);
  });
  EXPECT_EQ(error_text<c10::Error>([&] { store->close(); }), "no error");
  opener.join();
}

TEST_F(DistPushTest, AnErrorOfADeviceIsThePushs) {
  const auto store = make_store();
  store->init({"w", "v"}, Tensors::one_each({full(0), full(0)}));
  runtime_.fails = true;
  store->push("w", full(1, cuda(0)));
  const auto work = push_async(*store, "v", full(1, cuda(0)));
  const std::string expected =
      "copying the values from their device has raised the bus is on fire. "
      "Other ranks wait for the push until they time out";
  EXPECT_EQ(
      error_text<RemoteError>([&] { work->wait(); }), "push: " + expected);
  EXPECT_EQ(
      error_text<RemoteError>([&] { store->pull("w"); }), "pull: " + expected);
  runtime_.fails = false;
  store->push("w", full(2, cuda(0)));
  expect_value(*store, "w", 2);
  store->close();
}

TEST_F(DistPushTest, ADeviceThatIsTooSlowIsATimeout) {
  const auto store = make_store(/*timeout=*/0.5);
  store->init("w", full(0));
  runtime_.set_open(false);
  const auto work = push_async(*store, "w", full(1, cuda(0)));
  EXPECT_EQ(
      error_text<StoreTimeoutError>([&] { work->wait(); }),
      "push: timed out after 0.5 s; the values have not left their device. The "
      "outcome is unknown: do not repeat a push");
  runtime_.set_open(true);
  expect_value(*store, "w", 1); // it has left after all
  store->close();
}

} // namespace
} // namespace torchkv

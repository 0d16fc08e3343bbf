// Asynchronous calls on fake GPUs: streams of their work, order by wait(), and
// no memory freed in use.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "broken_runtime.h"
#include "device/work.h"
#include "devices_test.h"
#include "stores.h"

namespace torchkv {
namespace {

using mock_cuda::AddTwice;
using mock_cuda::broadcast_async;
using mock_cuda::BrokenRuntime;
using mock_cuda::Carrier;
using mock_cuda::cuda;
using mock_cuda::current_stream;
using mock_cuda::expect_full;
using mock_cuda::full;
using mock_cuda::make_optimizer;
using mock_cuda::make_store;
using mock_cuda::new_stream;
using mock_cuda::pull_async;
using mock_cuda::push_async;
using mock_cuda::pushpull_async;
using mock_cuda::refusal;
using mock_cuda::StorePtr;

constexpr int kNumDevices = 4;

// One tensor on each device: first, first + 1, ...
std::vector<at::Tensor> replicas(double first) {
  std::vector<at::Tensor> result;
  for (int i = 0; i < kNumDevices; ++i) {
    result.push_back(full(first + i, cuda(i)));
  }
  return result;
}

double sum_of_replicas(double first) {
  return kNumDevices * first + kNumDevices * (kNumDevices - 1) / 2.0;
}

void expect_all(const std::vector<at::Tensor>& tensors, double value) {
  for (const auto& tensor : tensors) {
    expect_full(tensor, value);
  }
}

std::vector<c10::Stream> current_streams() {
  std::vector<c10::Stream> result;
  for (int i = 0; i < kNumDevices; ++i) {
    result.push_back(current_stream(cuda(i)));
  }
  return result;
}

std::vector<c10::Stream> new_streams() {
  std::vector<c10::Stream> result;
  for (int i = 0; i < kNumDevices; ++i) {
    result.push_back(new_stream(cuda(i)));
  }
  return result;
}

void synchronize(const std::vector<c10::Stream>& streams) {
  for (const auto& stream : streams) {
    c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeStream(stream);
  }
}

void expect_unordered(const std::string& said) {
  EXPECT_NE(said.find("nothing orders the two"), std::string::npos) << said;
}

// Expects that the calling thread's current streams must not `use` the tensors.
void expect_all_unordered(
    const std::vector<at::Tensor>& tensors,
    const std::function<void(const at::Tensor&)>& use) {
  for (const auto& tensor : tensors) {
    expect_unordered(refusal([&] { use(tensor); }));
  }
}

class Thrower final : public OpaqueUpdater {
 public:
  void update(
      const Key& /*key*/,
      const at::Tensor& input,
      const at::Tensor& /*stored*/) override {
    input.add_(1);
    throw std::runtime_error("no");
  }
  std::optional<KeyKind> key_kind() const override {
    return std::nullopt;
  }
  at::Tensor serialize() const override {
    return {};
  }
};

class AsyncTest : public mock_cuda::DevicesTest,
                  public ::testing::WithParamInterface<Carrier> {
 protected:
  AsyncTest() : DevicesTest(kNumDevices) {
    if (GetParam() == Carrier::kOperators) {
      kernels::cuda::set_table(nullptr);
    }
  }

  static StorePtr store_with(const at::Tensor& value) {
    auto store = make_store(GetParam() == Carrier::kNccl ? "nccl" : "device");
    store->init(3, value);
    return store;
  }
};

TEST_P(AsyncTest, EveryCallMatchesItsSynchronousResult) {
  for (const auto home : {c10::Device(c10::kCPU), cuda(0), cuda(3)}) {
    const auto store = store_with(full(2, home));
    const auto outs = replicas(0);
    pull_async(*store, 3, Tensors::replicas(outs))->wait();
    expect_all(outs, 2);
    const auto values = replicas(1);
    push_async(*store, 3, Tensors::replicas(values))->wait();
    pull_async(*store, 3, Tensors::replicas(outs))->wait();
    expect_all(outs, sum_of_replicas(1));
    pushpull_async(
        *store, 3, Tensors::replicas(values), Tensors::replicas(outs))
        ->wait();
    expect_all(outs, sum_of_replicas(1));
    // Into the pushed tensors themselves.
    pushpull_async(*store, 3, Tensors::replicas(outs), Tensors::replicas(outs))
        ->wait();
    expect_all(outs, kNumDevices * sum_of_replicas(1));
    broadcast_async(*store, 5, full(7, home), Tensors::replicas(outs))->wait();
    expect_all(outs, 7);
  }
}

TEST_P(AsyncTest, TensorsMustNotBeUsedBeforeWait) {
  const auto store = store_with(full(0, cuda(1)));
  const auto values = replicas(1);
  const auto outs = replicas(0);
  const auto work = pushpull_async(
      *store, 3, Tensors::replicas(values), Tensors::replicas(outs));
  expect_all_unordered(outs, [](const auto& out) { out.cpu(); });
  expect_all_unordered(values, [](const auto& value) { value.fill_(100); });
  work->wait();
  for (const auto& value : values) {
    EXPECT_EQ(refusal([&] { value.fill_(100); }), "");
  }
  expect_all(outs, sum_of_replicas(1));
}

// Otherwise it would be on the callers' streams.
TEST_P(AsyncTest, AllWorkIsOnStreamsOfTheStore) {
  const std::vector<std::vector<at::Tensor>> pushes = {
      replicas(0), {full(1, cuda(1))}, {full(1, cuda(2))}};
  for (const auto& values : pushes) {
    const auto store = store_with(full(0, cuda(1)));
    const auto streams = current_streams();
    const auto work = push_async(*store, 3, Tensors::replicas(values));
    EXPECT_EQ(current_streams(), streams);
    EXPECT_FALSE(work->is_completed());
    synchronize(streams);
    EXPECT_FALSE(work->is_completed());
    work->wait();
    synchronize(streams);
    EXPECT_TRUE(work->is_completed());
  }
}

TEST_P(AsyncTest, TheFutureOrdersStreamsAsWaitDoes) {
  const auto store = store_with(full(5, cuda(0)));
  const auto outs = replicas(0);
  const auto work = pull_async(*store, 3, Tensors::replicas(outs));
  const auto future = work->get_future();
  EXPECT_TRUE(future->completed());
  expect_all_unordered(outs, [](const auto& out) { out.cpu(); });
  future->wait();
  expect_all(outs, 5);
}

TEST_P(AsyncTest, WaitOrdersTheStreamsThatAreCurrentThen) {
  const auto store = store_with(full(5, cuda(0)));
  const auto outs = replicas(0);
  const auto work = pull_async(*store, 3, Tensors::replicas(outs));
  {
    const c10::MultiStreamGuard guard(new_streams());
    work->wait();
    expect_all(outs, 5);
  }
  // expect_all blocked the host, but nothing after it did.
  const auto again = pull_async(*store, 3, Tensors::replicas(outs));
  std::thread([&] {
    const c10::MultiStreamGuard guard(new_streams());
    again->wait();
  }).join();
  expect_all_unordered(outs, [](const auto& out) { out.fill_(1); });
  again->wait();
  again->wait();
  for (const auto& out : outs) {
    EXPECT_EQ(refusal([&] { out.fill_(1); }), "");
  }
}

TEST_P(AsyncTest, TensorsAreHeldUntilWait) {
  const auto store = store_with(full(0, cuda(0)));
  const auto use_memory_of_the_freed = [] {
    for (const auto& value : replicas(-1)) {
      EXPECT_EQ(refusal([&] { value.add_(1); }), "");
    }
  };
  for (int i = 0; i < 3; ++i) {
    const auto work = push_async(*store, 3, Tensors::replicas(replicas(i)));
    use_memory_of_the_freed();
    const auto num_live = mock_cuda::num_live_blocks();
    work->wait();
    EXPECT_EQ(mock_cuda::num_live_blocks(), num_live - kNumDevices);
    use_memory_of_the_freed();
    expect_full(store->pull(3)[0], sum_of_replicas(i));
  }
}

TEST_P(AsyncTest, AWorkMayBeDestroyedEarly) {
  const auto store = store_with(full(0, cuda(0)));
  EXPECT_EQ(
      refusal([&] {
        push_async(*store, 3, Tensors::replicas(replicas(1)));
        pull_async(*store, 3, Tensors::replicas(replicas(0)));
        pushpull_async(
            *store, 3, full(2, cuda(1)), Tensors::replicas(replicas(0)));
        broadcast_async(
            *store, 4, full(5, cuda(2)), Tensors::replicas(replicas(0)));
      }),
      "");
  expect_full(store->pull(3)[0], 2);
  expect_full(store->pull(4)[0], 5);
}

TEST_P(AsyncTest, OtherStreamsThanTheCallersMayWait) {
  const auto store = store_with(full(0, cuda(0)));
  EXPECT_EQ(
      refusal([&] {
        const auto work = push_async(*store, 3, Tensors::replicas(replicas(1)));
        const c10::MultiStreamGuard guard(new_streams());
        work->wait();
      }),
      "");
}

TEST_P(AsyncTest, CallsOnAKeyStayInOrder) {
  const auto store = store_with(full(0, cuda(0)));
  store->set_updater(std::make_shared<AddTwice>());
  const auto outs = replicas(0);
  double expected = 0;
  for (int i = 0; i < 3; ++i) {
    push_async(*store, 3, Tensors::replicas(replicas(i)));
    const c10::MultiStreamGuard guard(new_streams());
    store->push(3, Tensors::replicas(replicas(i)));
    expected += 4 * sum_of_replicas(i);
    store->pull(3, Tensors::replicas(outs));
    expect_all(outs, expected);
    push_async(*store, 3, Tensors::replicas(replicas(1)));
    expected += 2 * sum_of_replicas(1);
    pull_async(*store, 3, Tensors::replicas(outs))->wait();
    expect_all(outs, expected);
  }
}

TEST_P(AsyncTest, Optimizers) {
  const auto weight_after_steps = [](bool async_op) {
    const auto store = store_with(full(1, cuda(2)));
    auto optimizer = make_optimizer("adam");
    optimizer.gradient.max_norm = 1;
    store->set_optimizer(optimizer);
    for (int i = 0; i < 3; ++i) {
      const auto values = Tensors::replicas(replicas(i));
      if (async_op) {
        push_async(*store, 3, values);
      } else {
        store->push(3, values);
      }
    }
    return store->pull(3)[0].cpu();
  };
  EXPECT_TRUE(at::equal(weight_after_steps(true), weight_after_steps(false)));
}

TEST_P(AsyncTest, KeysWithHomesOnAllDevices) {
  const auto store = store_with(full(0, cuda(0)));
  store->init({4, 5}, Tensors::one_each({full(0, cuda(1)), full(0, cuda(3))}));
  const auto outs = replicas(0);
  pushpull_async(
      *store,
      {3, 4, 5, 3},
      {{{full(1, cuda(1))}, replicas(2), replicas(3), {full(4, cuda(3))}}},
      {{{outs[0]}, {outs[1]}, {outs[2]}, {outs[3]}}})
      ->wait();
  expect_full(outs[0], 5);
  expect_full(outs[1], sum_of_replicas(2));
  expect_full(outs[2], sum_of_replicas(3));
  expect_full(outs[3], 5);
}

TEST_P(AsyncTest, ThreadsOnTheirOwnStreams) {
  constexpr int kThreads = 4;
  constexpr int kPushes = 8;
  const auto store = store_with(full(0, cuda(0)));
  store->set_updater(std::make_shared<AddTwice>());
  std::vector<std::string> said(kThreads);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (auto& text : said) {
    threads.emplace_back([&] {
      text = refusal([&] {
        const c10::MultiStreamGuard guard(new_streams());
        const auto outs = replicas(0);
        for (int i = 0; i < kPushes; ++i) {
          const auto pushed =
              push_async(*store, 3, Tensors::replicas(replicas(1)));
          pull_async(*store, 3, Tensors::replicas(outs))->wait();
          for (const auto& out : outs) {
            out.add_(1);
          }
          pushed->wait();
        }
      });
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(said, std::vector<std::string>(kThreads));
  expect_full(store->pull(3)[0], 2 * sum_of_replicas(1) * kThreads * kPushes);
}

TEST_P(AsyncTest, AnErrorKeepsTheCallersStreamsOrdered) {
  const auto store = store_with(full(0, cuda(1)));
  store->set_updater(std::make_shared<Thrower>());
  const c10::MultiStreamGuard guard(new_streams());
  const c10::DeviceGuard device(cuda(2));
  const auto streams = current_streams();
  auto values = replicas(1);
  EXPECT_THROW(
      push_async(*store, 3, Tensors::replicas(values)), std::runtime_error);
  EXPECT_EQ(current_streams(), streams);
  EXPECT_EQ(mock_cuda::current_device(), cuda(2));
  for (const auto& value : values) {
    EXPECT_EQ(refusal([&] { value.fill_(100); }), "");
  }
  EXPECT_THROW(
      push_async(*store, 3, Tensors::replicas(std::exchange(values, {}))),
      std::runtime_error);
  EXPECT_EQ(refusal([] {}), "");
}

TEST_P(AsyncTest, RejectedArgumentsEnqueueNothing) {
  const auto store = store_with(full(0, cuda(1)));
  const at::Tensor wrong = at::zeros(5, at::device(cuda(0)));
  mock_cuda::counters() = {};
  EXPECT_NE(refusal([&] { push_async(*store, 3, wrong); }), "");
  EXPECT_NE(refusal([&] { push_async(*store, 4, full(1, cuda(0))); }), "");
  EXPECT_NE(refusal([&] { pull_async(*store, 3, wrong); }), "");
  EXPECT_NE(
      refusal([&] { pushpull_async(*store, 3, full(1, cuda(0)), wrong); }), "");
  EXPECT_NE(
      refusal([&] { broadcast_async(*store, 3, wrong, full(1, cuda(0))); }),
      "");
  EXPECT_EQ(mock_cuda::counters().waits, 0);
}

TEST_P(AsyncTest, TheHostNeverBlocks) {
  const auto store = store_with(full(0, cuda(1)));
  const auto values = replicas(1);
  const auto outs = replicas(0);
  mock_cuda::counters() = {};
  for (int i = 0; i < 3; ++i) {
    const auto pushed = push_async(*store, 3, Tensors::replicas(values));
    const auto pulled = pull_async(*store, 3, Tensors::replicas(outs));
    pushed->wait();
    pulled->wait();
  }
  EXPECT_EQ(mock_cuda::counters().synchronizations, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Carriers,
    AsyncTest,
    ::testing::Values(Carrier::kOperators, Carrier::kKernels, Carrier::kNccl));

using AsyncStreamsTest = mock_cuda::DevicesTest;

TEST_F(AsyncStreamsTest, ALocalStoreHasFinishedWithCpuTensors) {
  const auto store = make_store("local");
  store->init(3, full(0));
  const at::Tensor out = full(0);
  const at::Tensor on_device = full(0, cuda(0));
  mock_cuda::counters() = {};
  const auto work = pushpull_async(*store, 3, full(1), out);
  EXPECT_TRUE(work->is_completed());
  EXPECT_EQ(mock_cuda::counters().records, 0);
  expect_full(out, 1);
  pushpull_async(*store, 3, full(2, cuda(1)), on_device)->wait();
  expect_full(on_device, 2);
}

// --- The checker detects defects of the store
// --------------------------------

void expect_freed_in_use(const std::string& said) {
  EXPECT_NE(said.find("was freed while"), std::string::npos) << said;
}

StorePtr store_of(Runtime& runtime) {
  auto store = c10::make_intrusive<KVStore>("device", runtime);
  store->init(3, full(1, cuda(0)));
  push_async(*store, 3, full(1, cuda(0)))->wait(); // keeps the value
  return store;
}

TEST_F(AsyncStreamsTest, ADestroyedWorkThatKeepsNoMemoryIsDetected) {
  BrokenRuntime runtime;
  const auto store = store_of(runtime);
  runtime.keeps = false;
  expect_freed_in_use(
      refusal([&] { push_async(*store, 3, full(2, cuda(1))); }));
}

TEST_F(AsyncStreamsTest, AWaitOnAnotherStreamThatKeepsNoMemoryIsDetected) {
  BrokenRuntime runtime;
  const auto store = store_of(runtime);
  runtime.keeps = false;
  expect_freed_in_use(refusal([&] {
    const auto work = push_async(*store, 3, full(2, cuda(1)));
    const c10::StreamGuard guard(new_stream(cuda(1)));
    work->wait();
  }));
}

TEST_F(AsyncStreamsTest, AWaitThatOrdersNothingIsDetected) {
  BrokenRuntime runtime;
  const auto store = store_of(runtime);
  const at::Tensor out = full(0, cuda(1));
  const auto work = pull_async(*store, 3, out);
  runtime.waits = false;
  work->wait();
  expect_unordered(refusal([&] { out.cpu(); }));
  runtime.waits = true;
  work->wait(); // before the out is freed
}

TEST_F(AsyncStreamsTest, ACallThatDoesNotWaitForTheCallerIsDetected) {
  BrokenRuntime runtime;
  const auto store = store_of(runtime);
  const at::Tensor value = full(2, cuda(0));
  runtime.waits = false;
  expect_unordered(refusal([&] { push_async(*store, 3, value); }));
}

} // namespace
} // namespace torchkv

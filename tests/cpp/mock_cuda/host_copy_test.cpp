// Values on fake GPUs on their way to CPU memory.
#include "dist/host_copy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "devices_test.h"
#include "error_text.h"
#include "host_memory.h"
#include "wrapped_runtime.h"

namespace torchkv::dist {
namespace {

using mock_cuda::counters;
using mock_cuda::cuda;
using mock_cuda::pinned_host_memory;

constexpr int64_t kLarge = 3 * 1024; // floats: three pages
constexpr size_t kLargeBytes = size_t{3} * 4096;

// Devices to which a copy may fail.
class FailingRuntime final : public testing::WrappedRuntime {
 public:
  void copy_pinned(const at::Tensor& destination, const at::Tensor& source)
      override {
    WrappedRuntime::copy_pinned(destination, source);
    if (fails) {
      throw std::runtime_error("the bus is on fire");
    }
  }

  bool fails = false;
};

class HostCopyTest : public mock_cuda::DevicesTest {
 protected:
  std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
    auto found = HostCopy(streams_, buffers_, tensors).wait();
    const std::lock_guard lock(mock_cuda::mutex());
    mock_cuda::forget_host_memory(); // which keeps what copies have written
    return found;
  }

  static at::Tensor large(double value, int device = 0) {
    return at::full(
        {kLarge}, value, at::device(cuda(device)).dtype(at::kFloat));
  }

  FailingRuntime runtime_;
  std::shared_ptr<Streams> streams_ = std::make_shared<Streams>(runtime_);
  std::shared_ptr<SharedMemory> memory_ = SharedMemory::create();
  Buffers buffers_{memory_, runtime_};
};

TEST_F(HostCopyTest, DevicesWriteToSharedMemoryItself) {
  const std::vector<at::Tensor> tensors{
      large(1), large(2, 1), at::arange(6, cuda(0)).view({2, 3})};
  const int64_t before = counters().operators;
  const auto found = copies(tensors);
  EXPECT_EQ(counters().operators, before + 3); // each is copied once
  ASSERT_EQ(found.size(), 3);
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::equal(found[i], tensors[i].cpu()));
    EXPECT_TRUE(found[i].is_contiguous());
    const bool is_shared =
        memory_->find(found[i].const_data_ptr(), found[i].nbytes()).has_value();
    EXPECT_EQ(is_shared, i < 2); // one of a few bytes is sent anyway
  }
  const auto pinned = pinned_host_memory();
  EXPECT_EQ(pinned.size(), 2);
  EXPECT_EQ(pinned.at(found[0].const_data_ptr()), kLargeBytes);
}

TEST_F(HostCopyTest, MemoryStaysPinnedForTheNextCopy) {
  std::vector<at::Tensor> tensors(20);
  for (auto& tensor : tensors) {
    tensor = large(1);
  }
  copies(tensors);
  const auto pinned = pinned_host_memory();
  EXPECT_EQ(pinned.size(), tensors.size());
  const auto found = copies(tensors);
  EXPECT_EQ(pinned_host_memory(), pinned);
  // What is in use is not used again.
  copies({large(2)});
  EXPECT_TRUE(at::equal(found[0], at::ones(kLarge)));
  EXPECT_EQ(pinned_host_memory().size(), pinned.size() + 1);
}

TEST_F(HostCopyTest, MemoryIsUnpinnedBeforeItIsFreed) {
  auto found = copies({large(1), large(2)});
  EXPECT_EQ(pinned_host_memory().size(), 2);
  buffers_ = Buffers(memory_, runtime_);
  EXPECT_EQ(pinned_host_memory().size(), 2); // in use
  found.clear();
  EXPECT_TRUE(pinned_host_memory().empty());
  EXPECT_EQ(memory_->num_used(), 0);
}

// While any is captured, a thread of its own pins, waits and unpins.
TEST_F(HostCopyTest, AnotherThreadMayCaptureAGraphMeanwhile) {
  HostCopy copy(streams_, buffers_, {large(1)});
  const c10::Stream stream = mock_cuda::new_stream(cuda(1));
  mock_cuda::begin_capture(stream);
  std::thread([&] {
    auto found = copy.wait();
    EXPECT_TRUE(at::equal(found[0], at::ones(kLarge)));
    EXPECT_EQ(pinned_host_memory().size(), 1);
    buffers_ = Buffers(memory_, runtime_);
    copy = HostCopy(streams_, buffers_, {});
    found.clear();
    EXPECT_TRUE(pinned_host_memory().empty());
  }).join();
  EXPECT_EQ(mock_cuda::refusal([&] { mock_cuda::end_capture(stream); }), "");
}

TEST_F(HostCopyTest, WhatCannotBePinnedIsCopiedAllTheSame) {
  const auto first = memory_->allocate(kLargeBytes);
  ASSERT_TRUE(mock_cuda::pin_host_memory(first.get(), kLargeBytes * 8));
  const auto found = copies({large(1)});
  EXPECT_EQ(pinned_host_memory().size(), 1);
  EXPECT_TRUE(at::equal(found[0], at::ones(kLarge)));
  ASSERT_TRUE(mock_cuda::unpin_host_memory(first.get()));
}

TEST_F(HostCopyTest, WithoutSharedMemoryPyTorchsIsUsed) {
  buffers_ = Buffers(nullptr, runtime_);
  const auto found = copies({large(1), large(2, 1)});
  EXPECT_TRUE(at::equal(found[0], at::ones(kLarge)));
  EXPECT_TRUE(at::equal(found[1], at::full({kLarge}, 2.0F)));
  EXPECT_TRUE(pinned_host_memory().empty());
}

// The device may still write to it.
TEST_F(HostCopyTest, MemoryOfACopyThatFailsIsNotUsedAgain) {
  runtime_.fails = true;
  EXPECT_NE(
      testing::error_text([&] {
        copies({large(1), large(2)});
      }).find("the bus is on fire"),
      std::string::npos);
  const size_t used = memory_->num_used();
  EXPECT_EQ(used, kLargeBytes);
  runtime_.fails = false;
  const auto pinned = pinned_host_memory();
  const auto found = copies({large(3)});
  EXPECT_EQ(memory_->num_used(), used + kLargeBytes);
  EXPECT_EQ(pinned.count(found[0].const_data_ptr()), 0);
}

} // namespace
} // namespace torchkv::dist

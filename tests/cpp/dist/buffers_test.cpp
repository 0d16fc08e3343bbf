#include "dist/buffers.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>

#include "dist/transport/shared_memory.h"

namespace torchkv::dist {
namespace {

constexpr int64_t kElements = 1'000'000; // elements

TEST(BuffersTest, MemoryIsSharedAndUsedAgain) {
  const auto memory = SharedMemory::create();
  const Buffers buffers(memory);
  const void* first = nullptr;
  {
    const at::Tensor tensor = buffers.empty({kElements}, at::kFloat);
    first = tensor.const_data_ptr();
    EXPECT_TRUE(memory->find(first, tensor.nbytes()).has_value());
  }
  EXPECT_EQ(buffers.empty({kElements}, at::kFloat).const_data_ptr(), first);
}

TEST(BuffersTest, WithoutEnoughMemoryToShareTheyUseOther) {
  size_t available = SIZE_MAX;
  const auto memory = SharedMemory::create([&] { return available; });
  const Buffers buffers(memory);
  available = size_t{1} << 20U;
  const at::Tensor tensor = buffers.empty({kElements}, at::kFloat).fill_(3);
  EXPECT_FALSE(memory->find(tensor.const_data_ptr(), 1).has_value());
  EXPECT_EQ(tensor.sum().item<double>(), 3e6);
  available = SIZE_MAX;
  const at::Tensor next = buffers.empty({2 * kElements}, at::kFloat);
  EXPECT_TRUE(memory->find(next.const_data_ptr(), 1).has_value());
}

} // namespace
} // namespace torchkv::dist

// Copies of the CUDA kernels, run on the host.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "cuda_keys.h"
#include "emulated_table.h"

namespace torchkv {
namespace {

using kernels::cuda::kLargeParams;
using kernels::cuda::kSmallParams;
using kernels::cuda::Launches;
using namespace testing; // NOLINT: all of it

TEST(CudaCopyTest, ManyCopiesOfSeveralOuts) {
  Random random(0);
  struct Copied {
    at::Tensor source;
    std::vector<at::Tensor> outs;
    std::vector<at::Tensor> expected;
  };
  for (const size_t params_bytes : {kSmallParams, kLargeParams}) {
    emulated_launches().clear();
    Launches launches(emulated_table(params_bytes), nullptr);
    std::vector<Copied> copies(300);
    for (size_t i = 0; i < copies.size(); ++i) {
      auto& [source, outs, expected] = copies[i];
      const auto size = static_cast<int64_t>(
          i % 30 == 7 ? 70000 + random() % 100 : random() % (i % 7 * 70 + 20));
      // At any offset, often with the same alignment for all.
      const auto shift = static_cast<int64_t>(random() % 17);
      const auto unit = int64_t{1} << random() % 5;
      source = at::randint(256, size + 64, at::kByte);
      const auto num_bytes = static_cast<int64_t>(source.numel() - 64);
      auto* from = source.mutable_data_ptr<uint8_t>() + shift;
      std::vector<void*> pointers;
      for (uint64_t k = 0; k < 1 + random() % 4; ++k) {
        const auto to =
            (shift + unit * static_cast<int64_t>(random() % 3)) % 32;
        outs.push_back(at::randint(256, size + 64, at::kByte));
        expected.push_back(outs.back().clone());
        expected.back()
            .slice(0, to, to + num_bytes)
            .copy_(source.slice(0, shift, shift + num_bytes));
        pointers.push_back(outs.back().mutable_data_ptr<uint8_t>() + to);
      }
      if (random() % 8 == 0) {
        pointers.push_back(from); // onto itself
      }
      expected.push_back(source.clone());
      outs.push_back(source);
      launches.add_copy(from, pointers.data(), pointers.size(), num_bytes);
    }
    EXPECT_EQ(launches.finish(), 0);
    for (size_t i = 0; i < copies.size(); ++i) {
      for (size_t k = 0; k < copies[i].outs.size(); ++k) {
        EXPECT_TRUE(at::equal(copies[i].outs[k], copies[i].expected[k]))
            << "copy " << i << ", out " << k;
      }
    }
    for (const auto& launch : emulated_launches()) {
      EXPECT_TRUE(launch.is_copy);
      EXPECT_LE(launch.params_bytes, params_bytes);
    }
  }
}

// The widest words that the alignment of source and outs allows.
TEST(CudaCopyTest, WordsAsWideAsPossible) {
  const at::Tensor bytes = at::zeros(200, at::kByte);
  auto* const data = bytes.mutable_data_ptr<uint8_t>();
  const std::vector<int> shifts{0, 8, 4, 2, 1, 16};
  emulated_launches().clear();
  Launches launches(emulated_table(), nullptr);
  for (const int shift : shifts) {
    void* const out = data + 103 + shift;
    launches.add_copy(data + 7, &out, 1, 50);
  }
  EXPECT_EQ(launches.finish(), 0);
  EXPECT_EQ(
      emulated_launches().at(0).alignments,
      (std::vector<int>{16, 8, 4, 2, 1, 16}));
}

TEST(CudaCopyTest, MoreOutsThanOneLaunchTakes) {
  const at::Tensor source = at::arange(5);
  const at::Tensor outs = at::zeros({1200, 5}, at::kLong);
  std::vector<void*> pointers;
  for (int64_t i = 0; i < 1200; ++i) {
    pointers.push_back(outs[i].mutable_data_ptr());
  }
  Launches launches(emulated_table(kSmallParams), nullptr);
  launches.add_copy(
      source.const_data_ptr(), pointers.data(), pointers.size(), 40);
  EXPECT_EQ(launches.finish(), 0);
  EXPECT_TRUE(at::equal(outs, source.expand({1200, 5})));
}

// ASSIGN of one value needs no arithmetic.
TEST(CudaCopyTest, AssignOfOneValueIsACopy) {
  Random random(0);
  gpu_equals_cpu({make_key(random, {at::kHalf, at::kHalf, 1, 10})});
  EXPECT_TRUE(emulated_launches().at(0).is_copy);
  gpu_equals_cpu({make_key(random, {at::kHalf, at::kFloat, 1, 10})});
  EXPECT_FALSE(emulated_launches().at(0).is_copy);
}

} // namespace
} // namespace torchkv

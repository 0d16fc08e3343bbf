// Copies on the CPU: of every size of element, into several outs.
#include "kernels/cpu/copy_batch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace torchkv {
namespace {

using kernels::cpu::CopyBatch;

TEST(CopyBatchTest, ManyCopiesOfSeveralOuts) {
  at::manual_seed(0);
  std::mt19937_64 random(0);
  const at::ScalarType dtypes[] = {
      at::kByte, at::kShort, at::kInt, at::kLong, at::kComplexDouble};
  std::vector<at::Tensor> sources;
  std::vector<std::vector<at::Tensor>> outs;
  for (int i = 0; i < 120; ++i) {
    const auto size = static_cast<int64_t>(
        i % 30 == 7 ? 300001 : random() % (i % 7 * 700 + 2));
    const auto dtype = dtypes[random() % std::size(dtypes)];
    sources.push_back(at::randint(-99, 99, {size}, at::kLong).to(dtype));
    outs.emplace_back(1 + random() % 5);
  }
  const int before = at::get_num_threads();
  for (const int num_threads : {1, 4}) {
    SCOPED_TRACE(::testing::Message() << num_threads << " threads");
    at::set_num_threads(num_threads);
    CopyBatch batch;
    for (size_t i = 0; i < sources.size(); ++i) {
      for (auto& out : outs[i]) {
        out = at::zeros_like(sources[i]);
        batch.add(sources[i], out);
      }
    }
    batch.run();
    for (size_t i = 0; i < sources.size(); ++i) {
      for (const auto& out : outs[i]) {
        EXPECT_TRUE(at::equal(out, sources[i])) << sources[i].sizes();
      }
    }
  }
  at::set_num_threads(before);
}

TEST(CopyBatchTest, PermutedAndOntoItself) {
  for (const int64_t size : {0, 5, 100000}) {
    const at::Tensor value = at::arange(3 * size, at::kInt).view({3, size}).t();
    const at::Tensor before = value.clone();
    const at::Tensor result = at::zeros({3, size}, at::kInt).t();
    CopyBatch batch;
    batch.add(value, result);
    batch.add(value, value);
    batch.run();
    EXPECT_TRUE(at::equal(result, before));
    EXPECT_TRUE(at::equal(value, before));
  }
}

} // namespace
} // namespace torchkv

// Sums of rows by the CUDA kernels, run on the host: those of PyTorch, in
// order.
#include "kernels/cuda/row_sum_thread.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "comm/cuda_dtype.h"
#include "emulated_table.h"

namespace torchkv {
namespace {

class CudaRowSumTest : public ::testing::TestWithParam<c10::ScalarType> {
 protected:
  // Sums of up to five of the rows, which are apart by `stride` elements and
  // begin at element `offset`.
  static void check(int64_t columns, int64_t stride, int64_t offset) {
    const c10::ScalarType dtype = GetParam();
    constexpr int64_t kRows = 40;
    const at::Tensor memory =
        at::randint(-100, 100, {offset + kRows * stride}, at::kDouble)
            .div_(7)
            .to(dtype);
    const at::Tensor rows =
        memory.narrow(0, offset, kRows * stride).view({kRows, stride});
    std::mt19937_64 random(0);
    constexpr int64_t kSums = 33;
    std::vector<const void*> sources;
    std::vector<int64_t> offsets{0};
    const c10::ScalarType accumulation = sum_type(dtype);
    const at::Tensor before =
        at::randint(-9, 9, {kSums + 1, columns}).to(accumulation);
    const at::Tensor added_to = at::randperm(kSums + 1, at::kLong);
    std::vector<at::Tensor> expected;
    const at::Tensor added = before.clone();
    for (int64_t i = 0; i < kSums; ++i) {
      at::Tensor total;
      const at::Tensor of_added = added[added_to[i].item<int64_t>()];
      for (auto left = static_cast<int64_t>(random() % 5); left >= 0; --left) {
        const at::Tensor row = rows[static_cast<int64_t>(random() % kRows)];
        sources.push_back(row.const_data_ptr());
        const at::Tensor own = row.narrow(0, 0, columns).to(accumulation);
        total = total.defined() ? total + own : own;
        of_added.add_(own);
      }
      offsets.push_back(static_cast<int64_t>(sources.size()));
      expected.push_back(total);
    }
    const at::Tensor sums = at::empty({kSums + 1, columns}, accumulation);
    sums.fill_(1);
    kernels::cuda::RowSums call{};
    call.value = cuda_dtype(dtype).value();
    const auto word = static_cast<int64_t>(16 / c10::elementSize(dtype));
    call.is_aligned =
        columns % word == 0 && stride % word == 0 && offset % word == 0;
    call.num_rows = kSums;
    call.num_columns = columns;
    call.sources = sources.data();
    call.offsets = offsets.data();
    call.sums = sums.mutable_data_ptr();
    EXPECT_EQ(testing::emulated_table().launch_row_sums(call, nullptr), 0);
    EXPECT_TRUE(at::equal(sums.narrow(0, 0, kSums), at::stack(expected)))
        << columns << ' ' << stride << ' ' << offset;
    EXPECT_TRUE(sums[kSums].eq(1).all().item<bool>());
    // To rows in any order.
    sums.copy_(before);
    call.added_to = added_to.const_data_ptr<int64_t>();
    EXPECT_EQ(testing::emulated_table().launch_row_sums(call, nullptr), 0);
    EXPECT_TRUE(at::equal(sums, added))
        << columns << ' ' << stride << ' ' << offset;
  }
};

TEST_P(CudaRowSumTest, AddsUpInOrder) {
  at::manual_seed(0);
  check(64, 64, 0);
  check(16, 48, 16);
  check(16, 48, 1);
  check(16, 17, 0);
  check(1, 1, 3);
  check(7, 9, 0);
  check(1040, 1040, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CudaRowSumTest,
    ::testing::Values(
        at::kFloat,
        at::kDouble,
        at::kHalf,
        at::kBFloat16,
        at::kBool,
        at::kByte,
        at::kChar,
        at::kShort,
        at::kInt,
        at::kLong),
    [](const auto& param) { return c10::toString(param.param); });

} // namespace
} // namespace torchkv

// Rows of row-sparse values: copied, moved and initialized.
#include "kernels/cpu/row_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

namespace torchkv::kernels::cpu {
namespace {

RowMemory memory_of(const at::Tensor& rows) {
  return {
      static_cast<char*>(rows.mutable_data_ptr()),
      rows.size(1),
      rows.scalar_type()};
}

RowInit normal(int64_t seed) {
  RowInit init;
  init.id = RowInit::Id::kNormal;
  init.seed = seed;
  return init;
}

TEST(RowMemoryTest, GathersRowsAndInitialValues) {
  for (const int64_t size : {1, 3, 64, 1000}) {
    const at::Tensor rows = at::rand({50, size});
    const int64_t count = 500;
    std::vector<int64_t> slots(count);
    std::vector<int64_t> ids(count);
    for (int64_t i = 0; i < count; ++i) {
      slots[i] = i % 7 == 0 ? -1 : (i * 31) % 50;
      ids[i] = i * i;
    }
    const at::Tensor out = at::empty({count, size});
    gather_rows(
        memory_of(rows),
        slots.data(),
        ids.data(),
        count,
        normal(5),
        static_cast<char*>(out.mutable_data_ptr()));
    for (int64_t i = 0; i < count; ++i) {
      at::Tensor expected = at::empty({1, size});
      if (slots[i] < 0) {
        init_rows(memory_of(expected), &ids[i], 1, normal(5));
      } else {
        expected = rows.narrow(0, slots[i], 1);
      }
      ASSERT_TRUE(at::equal(out.narrow(0, i, 1), expected)) << i;
    }
  }
}

TEST(RowMemoryTest, MovesRowsInOrder) {
  const at::Tensor rows = at::arange(8, at::kInt).view({4, 2}).clone();
  const std::vector<int64_t> from{3, 2};
  const std::vector<int64_t> to{2, 0};
  move_rows(memory_of(rows), from.data(), to.data(), 2);
  EXPECT_TRUE(at::equal(rows.select(1, 0), at::tensor({6, 2, 6, 6}, at::kInt)));
}

// The quantile of the number that a row's uniform value is.
TEST(RowMemoryTest, NormalNumbersHaveTheirProbabilities) {
  const int64_t count = 4096;
  std::vector<int64_t> ids(count);
  std::iota(ids.begin(), ids.end(), int64_t{-count / 2});
  const at::Tensor normals = at::empty({count, 3}, at::kDouble);
  const at::Tensor uniforms = at::empty({count, 3}, at::kDouble);
  init_rows(memory_of(normals), ids.data(), count, normal(9));
  RowInit uniform = normal(9);
  uniform.id = RowInit::Id::kUniform;
  init_rows(memory_of(uniforms), ids.data(), count, uniform);
  const auto* const z = normals.const_data_ptr<double>();
  const auto* const p = uniforms.const_data_ptr<double>();
  for (int64_t i = 0; i < normals.numel(); ++i) {
    EXPECT_NEAR(0.5 * std::erfc(-z[i] / std::sqrt(2.0)), p[i], 1e-15);
  }
}

TEST(RowMemoryTest, ZerosInAnyDtype) {
  for (const auto dtype : {at::kByte, at::kComplexDouble, at::kHalf}) {
    const at::Tensor rows = at::ones({2, 3}, dtype);
    const std::vector<int64_t> ids{1, 2};
    init_rows(memory_of(rows), ids.data(), 2, RowInit());
    EXPECT_TRUE(at::equal(rows, at::zeros({2, 3}, dtype)));
  }
}

} // namespace
} // namespace torchkv::kernels::cpu

// The CPU reduction: same bits as a plain loop, for every dtype and layout.
#include "kernels/cpu/sum.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace torchkv {
namespace {

std::vector<Value> values_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Value> values;
  values.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    values.push_back({Value::Form::kDense, &tensor});
  }
  return values;
}

// Left to right in `accumulation`, rounded once.
at::Tensor plain_sum(
    const std::vector<at::Tensor>& tensors,
    at::ScalarType accumulation,
    at::ScalarType dtype) {
  at::Tensor total = tensors[0].to(accumulation);
  for (size_t i = 1; i < tensors.size(); ++i) {
    total = total + tensors[i].to(accumulation);
  }
  return total.to(dtype);
}

void expect_same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  ASSERT_EQ(x.scalar_type(), y.scalar_type());
  ASSERT_EQ(x.nbytes(), y.nbytes());
  if (x.nbytes() != 0) {
    EXPECT_EQ(std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()), 0);
  }
}

struct Dtype {
  at::ScalarType storage;
  at::ScalarType accumulation;
};

class SumDtypeTest : public ::testing::TestWithParam<Dtype> {};

TEST_P(SumDtypeTest, EqualsThePlainLoop) {
  const auto [storage, accumulation] = GetParam();
  at::manual_seed(0);
  // Around the block of 1024 and the parallel grain of 32768.
  for (const int64_t size : {0, 1, 3, 1023, 1024, 1025, 40001}) {
    for (const int64_t replicas : {1, 2, 3, 8}) {
      std::vector<at::Tensor> tensors;
      tensors.reserve(replicas);
      for (int64_t i = 0; i < replicas; ++i) {
        tensors.push_back(at::mul(at::randn(size), 3).to(storage));
      }
      const at::Tensor result = at::empty(size, storage);
      kernels::cpu::sum(
          values_of(tensors), result, accumulation, /*same_layout=*/true);
      expect_same_bits(result, plain_sum(tensors, accumulation, storage));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    SumDtypeTest,
    ::testing::Values(
        Dtype{at::kFloat, at::kFloat},
        Dtype{at::kDouble, at::kDouble},
        Dtype{at::kHalf, at::kFloat},
        Dtype{at::kBFloat16, at::kFloat},
        Dtype{at::kFloat8_e4m3fn, at::kFloat},
        Dtype{at::kFloat8_e5m2, at::kFloat},
        Dtype{at::kComplexFloat, at::kComplexFloat},
        Dtype{at::kComplexDouble, at::kComplexDouble},
        Dtype{at::kChar, at::kChar},
        Dtype{at::kByte, at::kByte},
        Dtype{at::kShort, at::kShort},
        Dtype{at::kInt, at::kInt},
        Dtype{at::kLong, at::kLong},
        Dtype{at::kBool, at::kBool}),
    [](const auto& info) { return c10::toString(info.param.storage); });

TEST(SumTest, AnyStridesAndDtypes) {
  at::manual_seed(0);
  const std::vector<at::Tensor> tensors{
      at::randn({64, 48}).to(at::kBFloat16),
      at::randn({48, 64}).t(),
      at::randn({64, 96}).slice(1, 0, 96, 2).to(at::kHalf),
      at::randn({1, 48}).expand({64, 48}),
      at::randint(9, {64, 48}, at::kLong)};
  const at::Tensor result = at::empty({48, 64}).t();
  kernels::cpu::sum(
      values_of(tensors), result, at::kFloat, /*same_layout=*/false);
  expect_same_bits(result, plain_sum(tensors, at::kFloat, at::kFloat));
}

TEST(SumTest, MisalignedMemory) {
  const at::Tensor base = at::arange(1, 20002, at::kFloat);
  const std::vector<at::Tensor> tensors{
      base.slice(0, 1, 10001), base.slice(0, 3, 10003)};
  const at::Tensor result = at::zeros(10001).slice(0, 1);
  kernels::cpu::sum(
      values_of(tensors), result, at::kFloat, /*same_layout=*/true);
  expect_same_bits(result, tensors[0] + tensors[1]);
}

TEST(CopyTest, SmallLargeAndOntoItself) {
  for (const int64_t size : {0, 5, 100000}) {
    const at::Tensor value = at::arange(size, at::kInt);
    const at::Tensor result = at::empty_like(value);
    kernels::cpu::copy(value, result);
    expect_same_bits(result, value);
    kernels::cpu::copy(result, result);
    expect_same_bits(result, value);
  }
}

} // namespace
} // namespace torchkv

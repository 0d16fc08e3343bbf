// The elements of greatest magnitude, compared with a stable sort.
#include "kernels/cpu/select_top.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "kernels/codecs.h"

namespace torchkv {
namespace {

using kernels::cpu::select_top;

template <typename T>
void check(const at::Tensor& value, const at::Tensor& residual, int64_t count) {
  constexpr auto kDtype = c10::CppTypeToScalarType<T>::value;
  const at::Tensor sum =
      residual.defined() ? value.to(kDtype) + residual : value.to(kDtype);
  const int64_t size = sum.numel();
  const auto top = select_top(
      static_cast<const char*>(value.const_data_ptr()),
      value.scalar_type(),
      residual.defined() ? static_cast<const char*>(residual.const_data_ptr())
                         : nullptr,
      kDtype,
      size,
      count);
  const auto order = std::get<1>(
      at::sort(sum.abs(), /*stable=*/true, /*dim=*/0, /*descending=*/true));
  const at::Tensor expected = at::zeros({size}, at::kBool);
  expected.index_fill_(0, order.slice(0, 0, count), true);
  const at::Tensor chosen = at::empty({size}, at::kBool);
  for (int64_t i = 0; i < size; ++i) {
    const auto bits = codecs::magnitude_bits(sum.const_data_ptr<T>()[i]);
    chosen.mutable_data_ptr<bool>()[i] =
        bits > top.least_bits || (bits == top.least_bits && i < top.ties_end);
  }
  EXPECT_TRUE(chosen.equal(expected)) << size << ' ' << count;
}

TEST(SelectTopTest, IsThatOfAStableSort) {
  at::manual_seed(1);
  for (const int64_t size : {1, 2, 100, 1025, 200'000}) {
    for (const double share : {0.0, 0.01, 0.5, 1.0}) {
      const auto count = std::max(
          static_cast<int64_t>(share * static_cast<double>(size)), int64_t{1});
      const at::Tensor value = at::randn({size});
      check<float>(value, {}, count);
      check<float>(value.to(at::kHalf), at::randn({size}), count);
      check<float>(at::randint(-3, 3, {size}).to(at::kFloat), {}, count);
      check<float>(at::zeros({size}), {}, count);
      check<double>(value.to(at::kDouble), {}, count);
      check<double>(value, at::randn({size}, at::kDouble) * 1e-9, count);
    }
  }
}

TEST(SelectTopTest, ExtremeNumbers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const at::Tensor value = at::tensor(
      {0.0F, -0.0F, 1e-45F, -1e-45F, 1e-38F, 3e38F, -kInfinity, kInfinity});
  for (int64_t count = 1; count <= value.numel(); ++count) {
    check<float>(value, {}, count);
    check<double>(value, {}, count);
  }
}

} // namespace
} // namespace torchkv

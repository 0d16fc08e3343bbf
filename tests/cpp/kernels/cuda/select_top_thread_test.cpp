// What the CUDA kernels select for topk, run on the host: the elements that the
// CPU's kernels select.
#include "kernels/cuda/select_top_thread.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "emulated_table.h"
#include "kernels/codecs.h"
#include "kernels/cpu/select_top.h"

namespace torchkv {
namespace {

using namespace kernels::cuda; // NOLINT: all of it
using testing::emulated_table;

template <typename T>
std::vector<int64_t> selected(
    const at::Tensor& numbers,
    uint64_t least_bits,
    int64_t ties_end) {
  std::vector<int64_t> indices;
  const auto* const values = numbers.const_data_ptr<T>();
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    const auto bits = codecs::magnitude_bits(values[i]);
    if (bits > least_bits || (bits == least_bits && i < ties_end)) {
      indices.push_back(i);
    }
  }
  return indices;
}

template <typename T>
void check(const at::Tensor& numbers, int64_t num_sent) {
  const auto dtype = numbers.scalar_type();
  const at::Tensor values = at::randn_like(numbers);
  const at::Tensor residual = at::sub(numbers, values);
  const at::Tensor sums = at::add(values, residual);
  // Two values; the second begins at an address that is not aligned.
  const at::Tensor moved =
      at::empty({numbers.numel() + 1}, dtype).narrow(0, 1, numbers.numel());
  moved.copy_(values);
  std::vector<TopState> states(2);
  for (const uint32_t num_values : {1U, 2U}) {
    states.assign(2, TopState{});
    SelectTop call{};
    call.value = dtype_of<T>();
    call.is_aligned = num_values == 1;
    call.num_values = num_values;
    call.num_elements = numbers.numel();
    call.num_sent = num_sent;
    call.values[0] = {
        values.const_data_ptr(), residual.const_data_ptr(), &states[0]};
    call.values[1] = {
        moved.const_data_ptr(), residual.const_data_ptr(), &states[1]};
    ASSERT_EQ(emulated_table().launch_select_top(call, nullptr), 0);
    const auto top = kernels::cpu::select_top(
        static_cast<const char*>(values.const_data_ptr()),
        dtype,
        static_cast<const char*>(residual.const_data_ptr()),
        dtype,
        numbers.numel(),
        num_sent);
    const auto expected = selected<T>(sums, top.least_bits, top.ties_end);
    ASSERT_EQ(expected.size(), static_cast<size_t>(num_sent));
    for (uint32_t k = 0; k < num_values; ++k) {
      EXPECT_EQ(
          selected<T>(sums, states[k].least_bits, states[k].ties_end), expected)
          << num_sent << " of " << numbers.numel();
      for (const int64_t count : states[k].counts) {
        ASSERT_EQ(count, 0);
      }
    }
  }
}

template <typename T>
void check_all() {
  at::manual_seed(0);
  const auto dtype = c10::CppTypeToScalarType<T>::value;
  const auto check_sizes = [](const at::Tensor& numbers) {
    const int64_t size = numbers.numel();
    for (const int64_t num_sent :
         {int64_t{1}, size / 100 + 1, size / 2 + 1, size}) {
      check<T>(numbers, num_sent);
    }
  };
  for (const int64_t size : {1, 5, 1024, 20001}) {
    check_sizes(at::randn({size}, dtype));
    // Where many are equal, the first are sent.
    check_sizes(at::randint(-2, 3, {size}, dtype));
    check_sizes(at::zeros({size}, dtype));
  }
}

TEST(CudaSelectTopTest, SelectsWhatTheCpuSelects) {
  check_all<float>();
  check_all<double>();
}

template <typename V>
std::vector<TopPass> passes_of(int64_t num_elements) {
  std::vector<TopPass> passes;
  for_each_top_pass<V>(
      num_elements, [&](const TopPass& pass) { passes.push_back(pass); });
  return passes;
}

TEST(CudaSelectTopTest, PassesCoverAllBits) {
  const auto passes = passes_of<float>(2049);
  ASSERT_EQ(passes.size(), 5U); // of 11, 11 and 9 bits, and of 11 and 1
  for (size_t i = 0; i < passes.size(); ++i) {
    EXPECT_EQ(passes[i].is_first, i == 0);
    EXPECT_EQ(passes[i].is_of_index, i >= 3);
    EXPECT_EQ(
        passes[i].known,
        i == 0       ? 31U
            : i == 3 ? 12U
                     : passes[i - 1].shift);
  }
  EXPECT_EQ(passes[2].shift, 0U);
  EXPECT_EQ(passes[4].shift, 0U);
  EXPECT_EQ(passes_of<float>(1).size(), 3U);
  EXPECT_EQ(passes_of<Half>(2048).size(), 4U);
  EXPECT_EQ(passes_of<double>(1'000'000'000).size(), 9U);
}

} // namespace
} // namespace torchkv

// Sums and rules of the CUDA kernels, run on the host: the bits of the CPU
// kernels, for every dtype, number of values, rule, size and alignment.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda_keys.h"
#include "emulated_table.h"

namespace torchkv {
namespace {

using kernels::cuda::Launches;
using kernels::cuda::SumJob;
using namespace testing; // NOLINT: all of it

// --- Assigned sums

class CudaAssignTest : public ::testing::TestWithParam<Dtypes> {};

TEST_P(CudaAssignTest, EqualsTheCpu) {
  Random random(0);
  for (const int64_t num_values : kNumValues) {
    for (const uint64_t misaligned : {0, 1, 4, 0xFFFF}) {
      Options options{GetParam().value, GetParam().stored, num_values};
      options.misaligned = misaligned;
      std::vector<Key> keys;
      for (const int64_t size : {0, 1, 3, 7, 4097, 65541}) {
        options.size = size;
        keys.push_back(make_key(random, options));
      }
      gpu_equals_cpu(keys);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Floating,
    CudaAssignTest,
    ::testing::ValuesIn(kFloating),
    name_of_dtypes);
INSTANTIATE_TEST_SUITE_P(
    Integers,
    CudaAssignTest,
    ::testing::ValuesIn(kIntegers),
    name_of_dtypes);

TEST(CudaAssignTest, BoolsOfOtherBytesThanZeroAndOne) {
  Random random(0);
  std::vector<Key> keys{make_key(random, {at::kBool, at::kBool, 3, 1000})};
  for (auto& value : keys[0].values) {
    value.memory.view(at::kByte).random_(0, 3);
  }
  gpu_equals_cpu(keys);
}

TEST(CudaAssignTest, ComplexNumbersAreTwoRealOnes) {
  at::manual_seed(0);
  const std::vector<at::Tensor> tensors{
      at::randn(1001, at::kComplexFloat), at::randn(1001, at::kComplexFloat)};
  const at::Tensor stored = at::zeros(1001, at::kComplexFloat);
  const std::vector<const void*> values{
      tensors[0].const_data_ptr(), tensors[1].const_data_ptr()};
  SumJob job;
  job.values = values.data();
  job.num_values = 2;
  job.stored = stored.mutable_data_ptr();
  job.num_elements = 2002;
  Launches launches(emulated_table(), nullptr);
  launches.add(job);
  EXPECT_EQ(launches.finish(), 0);
  EXPECT_TRUE(at::equal(stored, tensors[0] + tensors[1]));
}

// A partial sum of halves continues in fp32, in place.
TEST(CudaAssignTest, TheFirstValueIsWhatIsStored) {
  Random random(0);
  for (const auto& dtypes : kFloating) {
    for (const int64_t num_values : kNumValues) {
      Options options{
          dtypes.value, at::toOpMathType(dtypes.stored), num_values, 4097};
      options.first_is_sum = dtypes.value != options.stored;
      Key key = make_key(random, options);
      key.stored = key.values[0];
      key.first_is_stored = true;
      gpu_equals_cpu({key});
    }
  }
}

// --- Rules

constexpr int64_t kSizes[] = {0, 1, 3, 7, 4097};

// Rules with norms have no kernels for fp64.
std::vector<Dtypes> dtypes_of(const RuleCase& rule) {
  std::vector<Dtypes> dtypes;
  for (const auto& each : kFloating) {
    if (each.value != at::kDouble || !has_norms(rule.rule)) {
      dtypes.push_back(each);
    }
  }
  return dtypes;
}

class CudaRuleTest : public ::testing::TestWithParam<RuleCase> {};

TEST_P(CudaRuleTest, EqualsTheCpu) {
  Random random(0);
  for (const auto& dtypes : dtypes_of(GetParam())) {
    for (const auto& step : steps_of(GetParam().rule)) {
      std::vector<Key> keys;
      for (const int64_t num_values : kNumValues) {
        for (const int64_t size : kSizes) {
          Options options{dtypes.value, dtypes.stored, num_values, size, step};
          keys.push_back(make_key(random, options));
          options.misaligned = random();
          options.follows_writes = true;
          keys.push_back(make_key(random, options));
          options.has_master = false;
          keys.push_back(make_key(random, options));
          options.first_is_sum = c10::isReducedFloatingType(dtypes.value);
          keys.push_back(make_key(random, options));
        }
      }
      gpu_equals_cpu(keys);
    }
  }
}

TEST_P(CudaRuleTest, OneTensorThatIsNotAligned) {
  Random random(0);
  for (const auto& dtypes : dtypes_of(GetParam())) {
    std::vector<Key> keys;
    for (int place = 0; place < 7; ++place) {
      Options options{dtypes.value, dtypes.stored, 2, 1001};
      options.step = steps_of(GetParam().rule)[1];
      options.misaligned = uint64_t{1} << place;
      keys.push_back(make_key(random, options));
    }
    gpu_equals_cpu(keys);
  }
}

TEST_P(CudaRuleTest, Large) {
  Random random(0);
  for (const auto& dtypes : dtypes_of(GetParam())) {
    for (const int64_t num_values : {1, 3}) {
      Options options{dtypes.value, dtypes.stored, num_values, 65541};
      options.step = steps_of(GetParam().rule)[3];
      gpu_equals_cpu({make_key(random, options)});
    }
  }
}

// Without NaN, so that every chunk counts in a norm: each is larger than those
// before it together.
TEST_P(CudaRuleTest, FiniteNumbersOfManyChunks) {
  Random random(0);
  at::manual_seed(0);
  constexpr int64_t kSize = 5 * kernels::cuda::kNormChunk + 77;
  const at::Tensor sizes = at::arange(kSize + 48)
                               .floor_divide(kernels::cuda::kNormChunk)
                               .to(at::kDouble)
                               .sub(3)
                               .exp2();
  for (const auto& dtypes : dtypes_of(GetParam())) {
    for (const auto& step : steps_of(GetParam().rule)) {
      Options options{dtypes.value, dtypes.stored, 2, kSize, step};
      Key key = make_key(random, options);
      const auto fill = [&](Block& block) {
        if (block.memory.defined()) {
          block.memory.copy_(at::rand_like(sizes).add(0.5).mul(sizes));
        }
      };
      for (auto* block : key.written()) {
        fill(*block);
      }
      std::for_each(key.values.begin(), key.values.end(), fill);
      if (key.master.memory.defined()) {
        key.stored.memory.copy_(key.master.memory);
      }
      gpu_equals_cpu({key});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    CudaRuleTest,
    ::testing::ValuesIn(rules_with_kernels()),
    [](const auto& info) { return info.param.name; });

} // namespace
} // namespace torchkv

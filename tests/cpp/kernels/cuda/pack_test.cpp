// How the keys of a call are packed into launches.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "cuda_keys.h"
#include "emulated_table.h"

namespace torchkv {
namespace {

using kernels::cuda::Dtype;
using kernels::cuda::kLargeParams;
using kernels::cuda::kMediumParams;
using kernels::cuda::kSmallParams;
using kernels::cuda::Launches;
using kernels::cuda::SumJob;
using namespace testing; // NOLINT: all of it

// Keys of all kinds.
std::vector<Key> random_keys(Random& random, int num_keys) {
  const auto rules = rules_with_kernels();
  std::vector<Key> keys;
  for (int i = 0; i < num_keys; ++i) {
    const bool is_integer = random() % 8 == 0;
    const auto& dtypes = is_integer ? kIntegers[random() % kIntegers.size()]
                                    : kFloating[random() % kFloating.size()];
    Options options{dtypes.value, dtypes.stored};
    options.num_values = kNumValues[random() % std::size(kNumValues)];
    options.size = static_cast<int64_t>(random() % (i % 7 * 70 + 2));
    if (!is_integer && random() % 4 != 0) {
      const RuleStep step =
          steps_of(rules[random() % rules.size()].rule)[random() % 4];
      if (dtypes.value != at::kDouble || !has_norms(step.rule)) {
        options.step = step;
      }
    }
    options.has_master = random() % 4 != 0;
    options.first_is_sum =
        c10::isReducedFloatingType(dtypes.value) && random() % 4 == 0;
    options.misaligned = random() % 4 == 0 ? random() : 0;
    keys.push_back(make_key(random, options));
  }
  return keys;
}

TEST(CudaLaunchesTest, KeysOfAllKinds) {
  Random random(0);
  for (const int num_keys : {1, 3, 161, 1000}) {
    const auto keys = random_keys(random, num_keys);
    for (const size_t params_bytes : {kSmallParams, kLargeParams}) {
      gpu_equals_cpu(keys, params_bytes);
      for (const auto& launch : emulated_launches()) {
        EXPECT_LE(launch.params_bytes, params_bytes);
      }
    }
  }
}

TEST(CudaLaunchesTest, ManyKeysInOneLaunch) {
  const auto keys = momentum_keys(161, 100);
  gpu_equals_cpu(keys);
  ASSERT_EQ(emulated_launches().size(), 1U);
  EXPECT_EQ(emulated_launches()[0].head.num_keys, 161U);
  gpu_equals_cpu(keys, kSmallParams);
  EXPECT_EQ(emulated_launches().size(), 3U);
}

// The host copies the parameters at each launch.
TEST(CudaLaunchesTest, ParametersAreAsLargeAsTheKeysNeed) {
  for (const auto& [num_keys, params_bytes] :
       {std::pair{60, kSmallParams},
        std::pair{161, kMediumParams},
        std::pair{500, kLargeParams}}) {
    gpu_equals_cpu(momentum_keys(num_keys, 100));
    ASSERT_EQ(emulated_launches().size(), 1U);
    EXPECT_EQ(emulated_launches()[0].params_bytes, params_bytes);
  }
}

// As during a capture.
TEST(CudaLaunchesTest, LimitedParameters) {
  const auto keys = momentum_keys(300, 10);
  emulated_launches().clear();
  Launches launches(emulated_table(), nullptr, kSmallParams);
  std::vector<const void*> values;
  for (const auto& key : keys) {
    launches.add(job_of(key, values));
  }
  EXPECT_TRUE(emulated_launches().empty()) << "before finish()";
  EXPECT_EQ(launches.finish(), 0);
  EXPECT_EQ(emulated_launches().size(), 5U);
  for (const auto& launch : emulated_launches()) {
    EXPECT_EQ(launch.params_bytes, kSmallParams);
  }
}

// Words of 16 bytes if all pointers of a key are aligned.
TEST(CudaLaunchesTest, AlignedKeysUseWords) {
  Random random(0);
  Options options{at::kFloat, at::kFloat, 2, 100};
  std::vector<Key> keys;
  for (const uint64_t misaligned : {0, 1, 4}) {
    options.misaligned = misaligned;
    keys.push_back(make_key(random, options));
  }
  gpu_equals_cpu(keys);
  EXPECT_EQ(emulated_launches().at(0).alignments, (std::vector<int>{16, 1, 1}));
}

// A different step for each key, until they fill the parameters from both ends.
TEST(CudaLaunchesTest, KeysOfDifferentSteps) {
  auto keys = momentum_keys(600, 3);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i].step.rule.lr = 0.001 * static_cast<double>(i + 1);
  }
  for (const size_t params_bytes : {kSmallParams, kLargeParams}) {
    gpu_equals_cpu(keys, params_bytes);
  }
}

// One block per chunk, so that the hardware balances the load.
TEST(CudaLaunchesTest, ABlockForEachChunk) {
  gpu_equals_cpu(momentum_keys(2, 1000003));
  ASSERT_EQ(emulated_launches().size(), 1U);
  EXPECT_EQ(emulated_launches()[0].head.num_chunks, 978U);
  gpu_equals_cpu(momentum_keys(1, 5));
  EXPECT_EQ(emulated_launches()[0].head.num_chunks, 1U);
}

TEST(CudaLaunchesTest, EmptyJobsLaunchNothing) {
  emulated_launches().clear();
  Launches launches(emulated_table(), nullptr);
  EXPECT_EQ(launches.finish(), 0);
  Random random(0);
  std::vector<const void*> values;
  const Key key = make_key(random, {at::kFloat, at::kFloat, 2, 0});
  launches.add(job_of(key, values));
  launches.add_copy(nullptr, nullptr, 0, 0);
  EXPECT_EQ(launches.finish(), 0);
  EXPECT_TRUE(emulated_launches().empty());
}

TEST(CudaLaunchesTest, TheFirstErrorEndsTheCall) {
  emulated_launches().clear();
  Random random(0);
  std::vector<const void*> values;
  Launches launches(emulated_table(), nullptr);
  const Key two = make_key(random, {at::kFloat, at::kFloat, 2, 10});
  const Key three = make_key(random, {at::kFloat, at::kFloat, 3, 10});
  launches.add(job_of(two, values));
  launches.add(job_of(three, values));
  emulated_error() = 700;
  EXPECT_EQ(launches.finish(), 700);
  emulated_error() = 0;
  launches.add(job_of(two, values));
  EXPECT_EQ(launches.finish(), 700);
  EXPECT_EQ(emulated_launches().size(), 1U);
}

TEST(CudaLaunchesTest, SupportedJobs) {
  const auto supports = [](Dtype value,
                           Dtype stored,
                           RuleSpec::Id id,
                           size_t num_values = 2,
                           bool first_is_sum = false) {
    RuleStep step;
    step.rule.id = id;
    SumJob job;
    job.value = value;
    job.stored_dtype = stored;
    job.num_values = num_values;
    job.first_is_sum = first_is_sum;
    job.step = &step;
    return Launches::supports(job);
  };
  const auto assign = RuleSpec::Id::kAssign;
  const auto adam = RuleSpec::Id::kAdam;
  EXPECT_TRUE(supports(Dtype::kFloat, Dtype::kFloat, adam));
  const auto lamb = RuleSpec::Id::kLamb;
  EXPECT_TRUE(supports(Dtype::kHalf, Dtype::kFloat, lamb, 2, true));
  EXPECT_TRUE(supports(Dtype::kBFloat16, Dtype::kBFloat16, lamb, 1));
  EXPECT_FALSE(supports(Dtype::kFloat, Dtype::kFloat, lamb, 2, true));
  EXPECT_FALSE(supports(Dtype::kDouble, Dtype::kDouble, lamb));
  EXPECT_FALSE(
      supports(Dtype::kFloat, Dtype::kFloat, RuleSpec::Id::kMxnetGroupAdagrad));
  EXPECT_FALSE(supports(Dtype::kFloat, Dtype::kBFloat16, assign));
  EXPECT_FALSE(supports(Dtype::kHalf, Dtype::kBFloat16, assign));
  EXPECT_FALSE(supports(Dtype::kFloat, Dtype::kDouble, assign));
  EXPECT_FALSE(supports(Dtype::kInt32, Dtype::kInt64, assign));
  EXPECT_TRUE(supports(Dtype::kInt32, Dtype::kInt32, assign));
  EXPECT_FALSE(supports(Dtype::kInt32, Dtype::kInt32, adam));
  EXPECT_FALSE(supports(Dtype::kBool, Dtype::kBool, adam));
  // A partial sum of halves is fp32; that of floats is an ordinary value.
  EXPECT_TRUE(supports(Dtype::kHalf, Dtype::kFloat, assign, 2, true));
  EXPECT_FALSE(supports(Dtype::kFloat, Dtype::kFloat, assign, 2, true));
  EXPECT_TRUE(supports(Dtype::kFloat, Dtype::kFloat, adam, 400));
  EXPECT_FALSE(supports(Dtype::kFloat, Dtype::kFloat, adam, 500));
}

TEST(CudaLaunchesTest, AsManyValuesAsFit) {
  Random random(0);
  Options options{at::kBFloat16, at::kBFloat16, 400, 33};
  options.step = steps_of(rule_cases()[2].rule)[1];
  gpu_equals_cpu({make_key(random, options)}, kSmallParams);
}

} // namespace
} // namespace torchkv

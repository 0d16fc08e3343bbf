// Norms of the CUDA kernels, run on the host.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "cuda_keys.h"
#include "emulated_table.h"

namespace torchkv {
namespace {

using kernels::cuda::kNormChunk;
using kernels::cuda::Launches;
using kernels::cuda::SumJob;
using namespace testing; // NOLINT: all of it

double norm_on_gpu(
    const std::vector<Key>& keys,
    double scale,
    std::vector<double>* all = nullptr) {
  Launches launches(emulated_table(), nullptr);
  std::vector<const void*> values;
  std::vector<SumJob> jobs;
  int64_t count = 0;
  for (const auto& key : keys) {
    count += Launches::num_squares(job_of(key, values));
  }
  std::vector<double> squares(static_cast<size_t>(count), NAN);
  double* next = squares.data();
  for (const auto& key : keys) {
    const SumJob job = job_of(key, values);
    EXPECT_TRUE(Launches::supports_norm(job));
    launches.add_norm(job, scale, next);
    next += Launches::num_squares(job);
  }
  EXPECT_EQ(launches.finish(), 0);
  if (all != nullptr) {
    *all = squares;
  }
  return std::accumulate(squares.begin(), squares.end(), 0.0);
}

class CudaNormTest : public ::testing::TestWithParam<Dtypes> {};

TEST_P(CudaNormTest, EqualsTheCpu) {
  Random random(0);
  at::manual_seed(0);
  for (const double scale : {1.0, 0.25}) {
    for (const bool first_is_sum : {false, true}) {
      for (const uint64_t misaligned : {0, 1, 0xFFFF}) {
        std::vector<Key> keys;
        double expected = 0;
        for (const int64_t num_values : {1, 2, 5}) {
          for (const int64_t size : {0, 1, 7, 4097, 65541}) {
            Options options{
                GetParam().value, GetParam().stored, num_values, size};
            options.misaligned = misaligned;
            options.first_is_sum =
                first_is_sum && c10::isReducedFloatingType(options.value);
            options.step.rule.id = RuleSpec::Id::kAdam;
            options.step.scale = 0.5;
            options.step.clip_value = 1.5;
            options.step.last_scale = 100; // ignored by norms
            Key key = make_key(random, options);
            at::Tensor sum;
            for (auto& value : key.values) {
              value.memory.normal_();
              const at::Tensor wide =
                  value.tensor().to(at::toOpMathType(options.value));
              sum = sum.defined() ? sum + wide : wide;
            }
            expected += (sum * 0.5)
                            .clamp(-1.5, 1.5)
                            .to(at::kDouble)
                            .mul(scale)
                            .square()
                            .sum()
                            .item<double>();
            keys.push_back(key);
          }
        }
        emulated_launches().clear();
        std::vector<double> squares;
        std::vector<double> again;
        EXPECT_NEAR(
            norm_on_gpu(keys, scale, &squares), expected, 1e-10 * expected);
        EXPECT_LE(emulated_launches().size(), 3U); // by number of values
        norm_on_gpu(keys, scale, &again);
        EXPECT_EQ(squares, again);
        for (const auto& launch : emulated_launches()) {
          EXPECT_EQ(launch.head.chunk, kNormChunk);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Floating,
    CudaNormTest,
    ::testing::ValuesIn(kFloating),
    name_of_dtypes);

TEST(CudaNormTest, NonFiniteValues) {
  Random random(0);
  for (const double bad : {double(INFINITY), -double(INFINITY), double(NAN)}) {
    Options options{at::kFloat, at::kFloat, 2, 100};
    options.step.rule.id = RuleSpec::Id::kSgd;
    const Key key = make_key(random, options);
    key.values[0].memory.fill_(1);
    key.values[1].memory.fill_(1);
    EXPECT_EQ(norm_on_gpu({key}, 1), 400);
    key.values[1].tensor()[57] = bad;
    EXPECT_FALSE(std::isfinite(norm_on_gpu({key}, 1)));
  }
}

TEST(CudaNormTest, ManyKeysInOneLaunch) {
  const auto keys = momentum_keys(161, 100);
  emulated_launches().clear();
  norm_on_gpu(keys, 1);
  EXPECT_EQ(emulated_launches().size(), 1U);
}

TEST(CudaNormTest, IntegersAreNotSupported) {
  Random random(0);
  std::vector<const void*> values;
  const Key key = make_key(random, {at::kInt, at::kInt, 2, 10});
  EXPECT_FALSE(Launches::supports_norm(job_of(key, values)));
}

} // namespace
} // namespace torchkv

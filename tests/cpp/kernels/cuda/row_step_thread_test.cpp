// Steps of rows by the CUDA kernels, run on the host: the bits of the CPU
// kernels, for every rule, dtype and alignment, and nothing else is written.
#include "kernels/cuda/row_step_thread.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda_keys.h"
#include "emulated_table.h"
#include "kernels/cpu/row_sums.h"

namespace torchkv {
namespace {

using kernels::cpu::RowSource;
using kernels::cuda::RowSteps;
using namespace testing; // NOLINT: all of it

constexpr int64_t kRows = 23;

// The ids of rows that a replica pushes, ascending; some repeat.
std::vector<int64_t> random_ids(Random& random) {
  std::vector<int64_t> ids;
  for (int64_t row = 0; row < kRows; ++row) {
    for (auto left = static_cast<int64_t>(random() % 7) - 3; left > 0; --left) {
      ids.push_back(row);
    }
  }
  return ids;
}

// What replicas push, of the values of a key.
struct Pushed {
  Pushed(Random& random, const Key& key, int64_t num_columns) {
    for (const auto& value : key.values) {
      ids.push_back(random_ids(random));
      RowSource& source = sources.emplace_back();
      source.data = static_cast<const char*>(value.data());
      source.ids = ids.back().data();
      source.num_ids = static_cast<int64_t>(ids.back().size());
    }
    const auto bytes =
        num_columns * static_cast<int64_t>(c10::elementSize(key.value_dtype));
    for (int64_t row = 0; row < kRows; ++row) {
      for (size_t i = 0; i < sources.size(); ++i) {
        for (size_t k = 0; k < ids[i].size(); ++k) {
          if (ids[i][k] == row) {
            addresses.push_back(
                sources[i].data + static_cast<int64_t>(k) * bytes);
          }
        }
      }
      const auto end = static_cast<int64_t>(addresses.size());
      if (end != offsets.back()) {
        rows.push_back(row);
        offsets.push_back(end);
      }
    }
  }

  std::vector<std::vector<int64_t>> ids;
  std::vector<RowSource> sources;
  std::vector<const void*> addresses; // of the rows, by id
  std::vector<int64_t> offsets{0};
  std::vector<int64_t> rows; // distinct
};

RowSteps call_of(const Key& key, const Pushed& pushed, int64_t num_columns) {
  std::vector<const void*> values;
  const auto job = job_of(key, values);
  RowSteps call{};
  auto& gradients = call.gradients;
  gradients.value = job.value;
  gradients.num_rows = static_cast<int64_t>(pushed.rows.size());
  gradients.num_columns = num_columns;
  gradients.sources = pushed.addresses.data();
  gradients.offsets = pushed.offsets.data();
  call.stored = job.stored_dtype;
  call.step = job.step;
  call.rows = pushed.rows.data();
  call.memory = job.stored;
  call.master = job.master;
  call.states = job.states;
  call.follows_writes = job.follows_writes;
  auto bits =
      static_cast<uint64_t>(num_columns) * c10::elementSize(key.value_dtype);
  const auto add = [&](const void* memory) {
    bits |= reinterpret_cast<uintptr_t>(memory);
  };
  add(call.memory);
  add(call.master);
  std::for_each(call.states.begin(), call.states.end(), add);
  std::for_each(pushed.addresses.begin(), pushed.addresses.end(), add);
  gradients.is_aligned = bits % 16 == 0;
  return call;
}

void step_on_cpu(const Key& key, const Pushed& pushed, int64_t num_columns) {
  const at::Tensor stored = key.stored.tensor();
  kernels::cpu::RowSumBatch batch;
  batch.add(
      {pushed.sources,
       key.value_dtype,
       num_columns,
       /*begin=*/0,
       stored,
       at::toOpMathType(key.value_dtype),
       key.step,
       state_of(key)});
  batch.run();
}

class CudaRowStepTest : public ::testing::TestWithParam<RuleCase> {};

TEST_P(CudaRowStepTest, EqualsTheCpu) {
  Random random(0);
  std::vector<Dtypes> all = kFloating;
  all.push_back({at::kFloat, at::kHalf});
  all.push_back({at::kFloat, at::kBFloat16});
  for (const auto& dtypes : all) {
    int num_aligned = 0;
    for (const auto& step : steps_of(GetParam().rule)) {
      for (const int64_t num_columns : {1, 7, 16, 72}) {
        for (const int variant : {0, 1, 2, 3}) {
          Options options{dtypes.value, dtypes.stored, 3};
          options.size = kRows * 4 * num_columns; // of repeated rows, too
          options.step = step;
          options.has_master = variant % 2 == 0;
          options.misaligned = variant < 2 ? 0 : random();
          options.follows_writes = num_columns != 7;
          std::vector<Key> keys{make_key(random, options)};
          keys[0].stored.size = kRows * num_columns;
          const Pushed pushed(random, keys[0], num_columns);
          std::vector<Key> expected{keys[0].clone()};
          step_on_cpu(expected[0], pushed, num_columns);
          const RowSteps call = call_of(keys[0], pushed, num_columns);
          num_aligned += call.gradients.is_aligned ? 1 : 0;
          EXPECT_EQ(emulated_table().launch_row_steps(call, nullptr), 0);
          expect_same(keys, expected);
        }
      }
    }
    EXPECT_GT(num_aligned, 0) << dtypes.value << ' ' << dtypes.stored;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    CudaRowStepTest,
    ::testing::ValuesIn(rule_cases_that(&is_elementwise)),
    [](const auto& info) { return info.param.name; });

TEST(CudaRowStepTest, HasNoKernelForOtherDtypes) {
  using kernels::cuda::Dtype;
  using kernels::cuda::steps_rows;
  EXPECT_FALSE(steps_rows(Dtype::kHalf, Dtype::kBFloat16));
  EXPECT_FALSE(steps_rows(Dtype::kFloat, Dtype::kDouble));
  EXPECT_FALSE(steps_rows(Dtype::kDouble, Dtype::kFloat));
  EXPECT_FALSE(steps_rows(Dtype::kInt32, Dtype::kInt32));
}

} // namespace
} // namespace torchkv

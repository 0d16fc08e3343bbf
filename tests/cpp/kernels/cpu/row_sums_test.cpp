// Sums of rows: the bits of a plain loop and, in rows that are pushed, of the
// sums of dense values, for whole values and parts that begin within a row.
#include "kernels/cpu/row_sums.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/cpu/sum.h"
#include "rule_cases.h"
#include "state_line.h"

namespace torchkv {
namespace {

using kernels::cpu::RowSource;
using kernels::cpu::RowSumBatch;
using kernels::cpu::SumBatch;

// What a replica pushes: some rows, in any order, or a dense value.
struct Rows {
  at::Tensor data;
  at::Tensor ids; // undefined: dense
  at::Tensor order;

  RowSource source() const {
    RowSource result;
    result.data = static_cast<const char*>(data.const_data_ptr());
    result.is_dense = !ids.defined();
    if (ids.defined()) {
      result.ids = ids.const_data_ptr<int64_t>();
      result.num_ids = ids.numel();
      result.is_distinct = !order.defined() &&
          (ids.numel() < 2 || at::all(ids.diff() > 0).item<bool>());
    }
    if (order.defined()) {
      result.order = order.const_data_ptr<int64_t>();
    }
    return result;
  }
};

// In ascending order of the ids, or in the one in which they were drawn.
Rows any_rows(int64_t num_rows, int64_t row_size, int64_t count, bool sorted) {
  const at::Tensor ids = at::randint(num_rows, {count}, at::kLong);
  auto [ascending, order] =
      at::sort(ids, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  return {
      at::randn({count, row_size}), ascending, sorted ? at::Tensor() : order};
}

Rows consecutive_rows(int64_t first, int64_t count, int64_t row_size) {
  return {
      at::randn({count, row_size}),
      at::arange(first, first + count, at::kLong),
      {}};
}

// The sum of each row in fp32, and which rows have one.
struct PlainSum {
  at::Tensor total;
  at::Tensor has;
};

PlainSum plain_sum(
    const std::vector<Rows>& all,
    int64_t num_rows,
    int64_t row_size) {
  PlainSum sum{
      at::zeros({num_rows, row_size}), at::zeros({num_rows}, at::kBool)};
  const auto add = [&](int64_t row, const at::Tensor& numbers) {
    if (sum.has[row].item<bool>()) {
      sum.total[row].add_(numbers);
    } else {
      sum.total[row].copy_(numbers);
      sum.has[row].fill_(true);
    }
  };
  for (const auto& rows : all) {
    if (!rows.ids.defined()) {
      for (int64_t row = 0; row < num_rows; ++row) {
        add(row, rows.data[row]);
      }
      continue;
    }
    for (int64_t i = 0; i < rows.ids.numel(); ++i) {
      const int64_t at =
          rows.order.defined() ? rows.order[i].item<int64_t>() : i;
      add(rows.ids[i].item<int64_t>(), rows.data[at]);
    }
  }
  return sum;
}

std::vector<RowSource> sources_of(const std::vector<Rows>& all, int64_t begin) {
  std::vector<RowSource> sources;
  sources.reserve(all.size());
  for (const auto& rows : all) {
    sources.push_back(rows.source());
    if (sources.back().is_dense) {
      sources.back().data += begin * static_cast<int64_t>(sizeof(float));
    }
  }
  return sources;
}

struct StepMemory {
  at::Tensor stored;
  std::array<at::Tensor, kMaxStates> states;

  StepMemory clone() const {
    StepMemory result{stored.clone(), {}};
    for (size_t i = 0; i < kMaxStates; ++i) {
      if (states[i].defined()) {
        result.states[i] = states[i].clone();
      }
    }
    return result;
  }
};

StepMemory step_memory(const RuleSpec& rule, at::IntArrayRef sizes) {
  StepMemory memory{at::randn(sizes), {}};
  const auto names = state_names(rule);
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (names[i] != nullptr) {
      memory.states[i] = at::rand(sizes) + 0.5;
    }
  }
  return memory;
}

// The elements [begin, end) of the value in one job.
void step_rows(
    const std::vector<Rows>& all,
    const RuleStep& step,
    const StepMemory& memory,
    int64_t row_size,
    int64_t begin,
    int64_t end) {
  const auto part = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.view(-1).slice(0, begin, end) : tensor;
  };
  std::array<at::Tensor, kMaxStates> states;
  std::transform(
      memory.states.begin(), memory.states.end(), states.begin(), part);
  const at::Tensor stored = part(memory.stored);
  RuleStep shifted = step; // with the random numbers of the part
  shifted.stream += static_cast<uint64_t>(begin);
  RowSumBatch batch;
  batch.add(
      {sources_of(all, begin),
       at::kFloat,
       row_size,
       begin,
       stored,
       at::kFloat,
       shifted,
       testing::state_line(states)});
  batch.run();
}

void expect_same(const at::Tensor& actual, const at::Tensor& expected) {
  if (expected.defined()) {
    // Not equal(): the signs of zeros count.
    EXPECT_TRUE(actual.view(at::kInt).equal(expected.view(at::kInt)));
  }
}

void expect_near(const at::Tensor& actual, const at::Tensor& expected) {
  if (expected.defined()) {
    EXPECT_TRUE(at::allclose(actual, expected, 1e-6, 1e-6));
  }
}

std::vector<std::vector<Rows>> row_cases(int64_t num_rows, int64_t size) {
  const Rows dense{at::randn({num_rows, size}), {}, {}};
  const Rows sorted = any_rows(num_rows, size, num_rows, true);
  const Rows unsorted = any_rows(num_rows, size, num_rows / 2, false);
  const Rows none = any_rows(num_rows, size, 0, true);
  const Rows all = consecutive_rows(0, num_rows, size);
  const Rows some = consecutive_rows(num_rows / 3, num_rows / 3, size);
  return {
      {none},
      {sorted},
      {unsorted, sorted},
      {all},
      {all, all, all},
      {some, all, some},
      {all, unsorted},
      {some, none, sorted},
      {dense, some},
      {unsorted, dense, sorted},
      std::vector<Rows>(12, sorted), // more values of a row than lines are kept
  };
}

class RowSumsOfRule : public ::testing::TestWithParam<testing::RuleCase> {};

// A rule's step is that of SumBatch with the dense sum, in the pushed rows.
TEST_P(RowSumsOfRule, StepsPushedRowsOnly) {
  const RuleStep step = without_norms({GetParam().rule, 3, /*is_first=*/false});
  for (const auto [num_rows, size] :
       {std::array<int64_t, 2>{7, 1}, {31, 5}, {600, 64}}) {
    for (const auto& all : row_cases(num_rows, size)) {
      const PlainSum sum = plain_sum(all, num_rows, size);
      const StepMemory before = step_memory(step.rule, {num_rows, size});
      StepMemory expected = before.clone();
      const Value total(&sum.total);
      SumBatch batch;
      batch.add(
          {total,
           expected.stored,
           at::kFloat,
           step,
           testing::state_line(expected.states)});
      batch.run();
      const at::Tensor others = sum.has.logical_not();
      const auto restore = [&](const at::Tensor& to, const at::Tensor& from) {
        if (to.defined()) {
          to.index_put_({others}, from.index({others}));
        }
      };
      restore(expected.stored, before.stored);
      for (size_t i = 0; i < kMaxStates; ++i) {
        restore(expected.states[i], before.states[i]);
      }
      const int64_t middle = num_rows * size / 2 + 1; // in most, within a row
      for (const int64_t cut : {int64_t{0}, middle}) {
        const StepMemory memory = before.clone();
        if (cut != 0 && needs_gradient_norm(step.rule)) {
          continue; // of whole values
        }
        if (cut != 0) {
          step_rows(all, step, memory, size, 0, cut);
        }
        step_rows(all, step, memory, size, cut, num_rows * size);
        // Norms are added up in another order.
        const auto expect =
            needs_gradient_norm(step.rule) ? expect_near : expect_same;
        expect(memory.stored, expected.stored);
        for (size_t i = 0; i < kMaxStates; ++i) {
          expect(memory.states[i], expected.states[i]);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Rules,
    RowSumsOfRule,
    ::testing::ValuesIn(testing::rule_cases_that(can_step_rows)),
    [](const auto& info) { return info.param.name; });

TEST(RowSumsTest, AssignSetsOtherRowsToZero) {
  for (const auto [num_rows, size] :
       {std::array<int64_t, 2>{7, 1}, {31, 5}, {600, 64}}) {
    for (const auto& all : row_cases(num_rows, size)) {
      const PlainSum sum = plain_sum(all, num_rows, size);
      const StepMemory memory{at::randn({num_rows, size}), {}};
      const int64_t cut = num_rows * size / 3;
      step_rows(all, kAssignStep, memory, size, 0, cut);
      step_rows(all, kAssignStep, memory, size, cut, num_rows * size);
      expect_same(memory.stored, sum.total);
    }
  }
}

TEST(RowSumsTest, ADenseSourceMayBeTheResult) {
  const at::Tensor stored = at::randn({40, 6});
  const std::vector<Rows> all{
      {stored, {}, {}}, any_rows(40, 6, 10, false), consecutive_rows(3, 9, 6)};
  std::vector<Rows> copies = all;
  copies[0].data = stored.clone();
  const PlainSum sum = plain_sum(copies, 40, 6);
  step_rows(all, kAssignStep, {stored, {}}, 6, 0, 240);
  expect_same(stored, sum.total);
}

TEST(RowSumsTest, NormsAreThoseOfTheMergedRows) {
  RuleStep step{make_rule("test", "sgd", {{"lr", 0.1}})};
  step.scale = 0.5;
  for (const auto& all : row_cases(600, 64)) {
    const at::Tensor stored = at::randn({600, 64});
    const at::Tensor before = stored.clone();
    RowSumBatch batch;
    batch.add(
        {sources_of(all, 0), at::kFloat, 64, 0, stored, at::kFloat, step, {}});
    const at::Tensor gradient =
        plain_sum(all, 600, 64).total.to(at::kDouble) * (0.5 * 3);
    const double expected = (gradient * gradient).sum().item<double>();
    EXPECT_NEAR(batch.squared_norm(3), expected, 1e-12 * expected);
    expect_same(stored, before);
  }
}

// Large enough for several pieces and threads; several jobs in one batch.
TEST(RowSumsTest, ThreadsDoNotChangeTheBits) {
  constexpr int64_t kRows = 40'000;
  const std::vector<Rows> all{
      any_rows(kRows, 16, kRows, false),
      any_rows(kRows, 16, kRows, true),
      consecutive_rows(100, kRows / 2, 16)};
  const RuleStep step{make_rule("test", "adagrad", {{"lr", 0.1}})};
  const StepMemory before = step_memory(step.rule, {kRows, 16});
  const int num_threads = at::get_num_threads();
  std::vector<StepMemory> results;
  std::vector<double> norms;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    const StepMemory memory = before.clone();
    const at::Tensor assigned = at::randn({kRows, 16});
    RowSumBatch batch;
    const auto sources = sources_of(all, 0);
    batch.add(
        {sources,
         at::kFloat,
         16,
         0,
         memory.stored,
         at::kFloat,
         step,
         testing::state_line(memory.states)});
    norms.push_back(batch.squared_norm(1));
    batch.add({sources, at::kFloat, 16, 0, assigned, at::kFloat});
    batch.run();
    results.push_back({memory.stored, {memory.states[0], assigned}});
  }
  at::set_num_threads(num_threads);
  for (size_t i = 1; i < results.size(); ++i) {
    expect_same(results[i].stored, results[0].stored);
    expect_same(results[i].states[0], results[0].states[0]);
    expect_same(results[i].states[1], results[0].states[1]);
    EXPECT_EQ(norms[i], norms[0]);
  }
}

} // namespace
} // namespace torchkv

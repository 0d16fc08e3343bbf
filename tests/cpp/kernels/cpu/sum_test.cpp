// Sums on the CPU: the bits of a plain loop, for every dtype, memory layout and
// mix of them in one batch.
#include "kernels/cpu/sum.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "state_line.h"

namespace torchkv {
namespace {

using kernels::cpu::StridedSums;
using kernels::cpu::SumBatch;

using Tensors = std::vector<at::Tensor>;

std::vector<Value> values_of(const Tensors& tensors) {
  std::vector<Value> values;
  values.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    values.push_back(Value(&tensor));
  }
  return values;
}

void sum_strided(
    c10::ArrayRef<Value> values,
    const at::Tensor& stored,
    at::ScalarType accumulation,
    const RuleStep& step,
    const kernels::cpu::StateLine& state = {}) {
  StridedSums sums;
  sums.add({values, stored, accumulation, step, state});
  sums.run(at::empty({sums.scratch_bytes()}, at::kByte));
}

RuleStep sgd_step(double lr, double weight_decay) {
  return {{RuleSpec::Id::kSgd, lr, weight_decay}};
}

const RuleStep kRules[] = {{}, sgd_step(0.1, 0), sgd_step(0.1, 0.01)};

bool takes(at::ScalarType dtype, const RuleStep& rule) {
  return rule.rule.id == RuleSpec::Id::kAssign || c10::isFloatingType(dtype) ||
      c10::isComplexType(dtype);
}

// a + number * b, each operation rounded by itself; a complex number as two
// real ones.
at::Tensor add_scaled(const at::Tensor& a, const at::Tensor& b, double number) {
  if (a.is_complex()) {
    return at::view_as_complex(
        add_scaled(at::view_as_real(a), at::view_as_real(b), number));
  }
  return a + b * number;
}

// Left to right in `accumulation`, then the rule in the arithmetic of the
// stored dtype, rounded once.
at::Tensor plain_update(
    const RuleStep& step,
    const Tensors& values,
    const at::Tensor& stored,
    at::ScalarType accumulation) {
  at::Tensor total = values[0].to(accumulation);
  for (size_t i = 1; i < values.size(); ++i) {
    total = total + values[i].to(accumulation);
  }
  const RuleSpec& rule = step.rule;
  if (rule.id == RuleSpec::Id::kSgd) {
    const at::Tensor weight = stored.to(at::toOpMathType(stored.scalar_type()));
    total = total.to(weight.scalar_type());
    if (rule.weight_decay != 0) {
      total = add_scaled(total, weight, rule.weight_decay);
    }
    total = add_scaled(weight, total, -rule.lr);
  }
  return total.to(stored.scalar_type());
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
      (x.nbytes() == 0 ||
       std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0);
}

// One sum of tensors of the same memory layout.
void sum_dense(
    const RuleStep& rule,
    const Tensors& values,
    const at::Tensor& stored,
    at::ScalarType accumulation) {
  SumBatch batch;
  batch.add({values_of(values), stored, accumulation, rule});
  batch.run();
}

at::Tensor random_tensor(at::IntArrayRef shape, at::ScalarType dtype) {
  const at::Tensor real = at::mul(at::randn(shape), 3);
  return c10::isComplexType(dtype)
      ? at::complex(real, at::randn(shape)).to(dtype)
      : real.to(dtype);
}

// Runs the body on one thread, then on four.
template <class Body>
void for_thread_counts(Body body) {
  const int before = at::get_num_threads();
  for (const int num_threads : {1, 4}) {
    SCOPED_TRACE(::testing::Message() << num_threads << " threads");
    at::set_num_threads(num_threads);
    body();
  }
  at::set_num_threads(before);
}

struct Dtype {
  at::ScalarType storage;
  at::ScalarType accumulation;
};

const Dtype kDtypes[] = {
    {at::kFloat, at::kFloat},
    {at::kDouble, at::kDouble},
    {at::kHalf, at::kFloat},
    {at::kBFloat16, at::kFloat},
    {at::kFloat8_e4m3fn, at::kFloat},
    {at::kFloat8_e5m2, at::kFloat},
    {at::kComplexHalf, at::kComplexFloat},
    {at::kComplexFloat, at::kComplexFloat},
    {at::kComplexDouble, at::kComplexDouble},
    {at::kChar, at::kChar},
    {at::kByte, at::kByte},
    {at::kShort, at::kShort},
    {at::kInt, at::kInt},
    {at::kLong, at::kLong},
    {at::kUInt16, at::kLong},
    {at::kUInt32, at::kLong},
    {at::kBool, at::kBool}};

class SumDtypeTest : public ::testing::TestWithParam<Dtype> {};

TEST_P(SumDtypeTest, EqualsThePlainLoop) {
  const auto [storage, accumulation] = GetParam();
  at::manual_seed(0);
  // Around the block size, and with enough work for several threads.
  for (const int64_t size : {0, 1, 3, 255, 256, 257, 1023, 1025, 140001}) {
    for (const int64_t replicas : {1, 2, 3, 8}) {
      Tensors values;
      for (int64_t i = 0; i < replicas; ++i) {
        values.push_back(random_tensor(size, storage));
      }
      const at::Tensor before = random_tensor(size, storage);
      for (const auto& rule : kRules) {
        if (!takes(storage, rule)) {
          continue;
        }
        const auto expected = plain_update(rule, values, before, accumulation);
        const at::Tensor stored = before.clone();
        sum_dense(rule, values, stored, accumulation);
        EXPECT_TRUE(same_bits(stored, expected))
            << size << " elements of " << replicas << " values";
        stored.copy_(before);
        sum_strided(values_of(values), stored, accumulation, rule);
        EXPECT_TRUE(same_bits(stored, expected))
            << size << " elements of " << replicas << " values, strided";
        // Two outs, of which one is a value, too.
        const Tensors outs{at::empty_like(before), values[0].clone()};
        Tensors given = values;
        given[0] = outs[1];
        stored.copy_(before);
        SumBatch batch;
        batch.add({values_of(given), stored, accumulation, rule, {}, outs});
        batch.run();
        for (const auto& written : {stored, outs[0], outs[1]}) {
          EXPECT_TRUE(same_bits(written, expected))
              << size << " elements of " << replicas << " values, with outs";
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    SumDtypeTest,
    ::testing::ValuesIn(kDtypes),
    [](const auto& info) { return c10::toString(info.param.storage); });

// --- Batches

TEST(SumBatchTest, ManySumsOfMixedDtypesAndSizes) {
  const std::vector<std::pair<at::ScalarType, at::ScalarType>> mixed{
      {at::kBFloat16, at::kFloat},
      {at::kFloat, at::kBFloat16},
      {at::kDouble, at::kFloat},
      {at::kFloat, at::kComplexFloat},
      {at::kByte, at::kInt},
      {at::kShort, at::kHalf}};
  std::mt19937_64 random(0);
  at::manual_seed(0);
  struct Sum {
    Tensors values;
    at::Tensor before;
    at::Tensor stored;
    at::ScalarType accumulation;
  };
  for (const auto& rule : kRules) {
    std::vector<Sum> sums;
    for (int i = 0; i < 150; ++i) {
      // Mostly small; some are split into pieces.
      const auto size = static_cast<int64_t>(
          i % 30 == 7 ? 300000 + random() % 9 : random() % (i % 7 * 700 + 2));
      Sum& sum = sums.emplace_back();
      const auto& pair = mixed[random() % mixed.size()];
      const auto& dtype = kDtypes[random() % std::size(kDtypes)];
      const bool is_mixed = random() % 3 == 0;
      const auto storage = is_mixed ? pair.second : dtype.storage;
      sum.accumulation = is_mixed
          ? at::toOpMathType(c10::promoteTypes(pair.first, pair.second))
          : dtype.accumulation;
      for (uint64_t k = 0; k < 1 + random() % 5; ++k) {
        sum.values.push_back(
            random_tensor(size, is_mixed && k != 1 ? pair.first : storage));
      }
      sum.before = random_tensor(size, storage);
      if (!takes(storage, rule)) {
        sums.pop_back();
      }
    }
    for_thread_counts([&] {
      SumBatch batch;
      for (auto& sum : sums) {
        sum.stored = sum.before.clone();
        batch.add({values_of(sum.values), sum.stored, sum.accumulation, rule});
      }
      batch.run();
      for (const auto& sum : sums) {
        EXPECT_TRUE(same_bits(
            sum.stored,
            plain_update(rule, sum.values, sum.before, sum.accumulation)))
            << sum.values.size() << " values of " << sum.values[0].dtype()
            << " into " << sum.stored.dtype() << sum.stored.sizes();
      }
    });
  }
}

TEST(SumBatchTest, EmptyBatchAndEmptyTensors) {
  SumBatch batch;
  batch.run();
  const Tensors values{at::empty({3, 0})};
  const at::Tensor empty = at::empty({3, 0});
  batch.add({values_of(values), empty, at::kFloat});
  batch.run();
}

TEST(SumBatchTest, MisalignedMemory) {
  const at::Tensor base = at::arange(1, 200002, at::kFloat);
  const Tensors values{base.slice(0, 1, 100001), base.slice(0, 3, 100003)};
  for (const auto& rule : kRules) {
    const at::Tensor stored = at::zeros(100001).slice(0, 1);
    const auto expected = plain_update(rule, values, stored, at::kFloat);
    sum_dense(rule, values, stored, at::kFloat);
    EXPECT_TRUE(same_bits(stored, expected));
  }
}

// The same sum however the work is split.
TEST(SumBatchTest, TheStoredValueAsAValue) {
  for_thread_counts([] {
    for (const auto dtype : {at::kFloat, at::kHalf, at::kLong}) {
      const at::Tensor stored = random_tensor(200001, dtype);
      const Tensors values{random_tensor(200001, dtype), stored, stored};
      const auto accumulation = at::toOpMathType(dtype);
      const auto expected = plain_update({}, values, stored, accumulation);
      sum_dense({}, values, stored, accumulation);
      EXPECT_TRUE(same_bits(stored, expected)) << dtype;
    }
  });
}

// More than the caches hold, which are bypassed.
TEST(SumBatchTest, LargeOutsOfAnyAlignment) {
  constexpr int64_t kSize = 10'000'003;
  const at::Tensor value = at::arange(kSize, at::kFloat);
  const at::Tensor memory = at::empty(2 * kSize + 1);
  const Tensors outs{memory.slice(0, 1, kSize + 1), memory.slice(0, kSize + 1)};
  for (const auto& rule : kRules) {
    const at::Tensor before = at::ones(kSize);
    const Tensors values{value, before}; // and to be written
    const auto expected = plain_update(rule, values, before, at::kFloat);
    SumBatch batch;
    batch.add({values_of(values), before, at::kFloat, rule, {}, outs});
    batch.run();
    for (const auto& written : {before, outs[0], outs[1]}) {
      EXPECT_TRUE(same_bits(written, expected));
    }
  }
}

// --- Layouts

using Random = std::mt19937_64;

// Zeros with the dimensions in random order in memory.
at::Tensor permuted(
    at::IntArrayRef shape,
    at::ScalarType dtype,
    Random& random) {
  std::vector<int64_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (const int64_t i : order) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return at::zeros(stride, dtype).as_strided(shape, strides);
}

at::Tensor contiguous(at::IntArrayRef shape, at::ScalarType dtype, Random&) {
  return at::zeros(shape, dtype);
}

// Every other element of a dimension, from the second on.
at::Tensor sliced(at::IntArrayRef shape, at::ScalarType dtype, Random& random) {
  const auto i = static_cast<int64_t>(random() % shape.size());
  std::vector<int64_t> whole(shape.vec());
  whole[i] = whole[i] * 2 + 1;
  return permuted(whole, dtype, random).slice(i, 1, whole[i], 2);
}

// Only for values, because a dimension repeats its elements.
at::Tensor expanded(
    at::IntArrayRef shape,
    at::ScalarType dtype,
    Random& random) {
  const auto i = static_cast<int64_t>(random() % shape.size());
  std::vector<int64_t> small(shape.vec());
  small[i] = 1;
  return permuted(small, dtype, random).expand(shape);
}

// Dimensions of one element have arbitrary strides.
at::Tensor odd_strides(at::IntArrayRef shape, at::ScalarType dtype, Random&) {
  const at::Tensor tensor = at::zeros(shape, dtype);
  std::vector<int64_t> strides(tensor.strides().vec());
  for (size_t i = 0; i < shape.size(); ++i) {
    strides[i] = shape[i] == 1 ? 17 : strides[i];
  }
  return tensor.as_strided(shape, strides);
}

using Layout = at::Tensor (*)(at::IntArrayRef, at::ScalarType, Random&);
constexpr Layout kLayouts[] =
    {permuted, contiguous, sliced, odd_strides, permuted, expanded};

// Matrices, and shapes above and below the size of a block of copies; with
// dimensions of size 1 and 0.
const std::vector<std::vector<int64_t>> kShapes{
    {65, 17, 33},
    {130, 70},
    {64, 16},
    {200, 3, 3, 7},
    {2, 3, 4, 5, 6},
    {1, 65, 1, 33},
    {33, 1},
    {300},
    {5, 0, 3},
    {1, 1}};

// Fills all of a tensor's memory, including gaps, with random numbers.
at::Tensor fill_memory(const at::Tensor& tensor) {
  const at::Tensor memory = at::empty(0, tensor.options());
  memory.set_(tensor.storage());
  return memory.copy_(random_tensor(memory.sizes(), tensor.scalar_type()));
}

TEST(SumStridedTest, MixedLayoutsAndDtypes) {
  const std::vector<Dtype> dtypes{
      {at::kFloat, at::kFloat},
      {at::kBFloat16, at::kFloat},
      {at::kHalf, at::kFloat},
      {at::kDouble, at::kDouble},
      {at::kComplexDouble, at::kComplexDouble},
      {at::kChar, at::kChar},
      {at::kBool, at::kBool}};
  Random random(0);
  at::manual_seed(0);
  for (int round = 0; round < 400; ++round) {
    const auto& shape = kShapes[random() % kShapes.size()];
    const auto& rule = kRules[random() % std::size(kRules)];
    auto [dtype, accumulation] = dtypes[random() % dtypes.size()];
    if (!takes(dtype, rule)) {
      continue;
    }
    Tensors values;
    for (uint64_t k = 0; k < 1 + random() % 4; ++k) {
      auto value_dtype = dtype;
      if (dtype == at::kFloat && random() % 4 == 0) {
        value_dtype = random() % 2 == 0 ? at::kHalf : at::kLong;
      }
      const Layout layout = kLayouts[random() % std::size(kLayouts)];
      values.push_back(layout(shape, value_dtype, random));
      fill_memory(values.back());
    }
    // Any but the last one, which is for values only.
    const Layout layout = kLayouts[random() % (std::size(kLayouts) - 1)];
    const at::Tensor stored = layout(shape, dtype, random);
    const at::Tensor memory = fill_memory(stored);
    const at::Tensor expected = memory.clone();
    expected.as_strided(shape, stored.strides(), stored.storage_offset())
        .copy_(plain_update(rule, values, stored, accumulation));
    sum_strided(values_of(values), stored, accumulation, rule);
    ASSERT_TRUE(same_bits(memory, expected))
        << "round " << round << ", " << values.size() << " values, stored "
        << dtype << stored.sizes() << stored.strides();
  }
}

TEST(SumStridedTest, ChannelsLastAndBack) {
  at::manual_seed(0);
  const auto last = at::MemoryFormat::ChannelsLast;
  const auto plain = at::MemoryFormat::Contiguous;
  for (const auto& rule : kRules) {
    for (const auto& [of_values, of_stored] :
         {std::pair{last, plain}, {plain, last}, {last, last}}) {
      const Tensors values{
          at::randn({65, 17, 3, 5}).contiguous(of_values),
          at::randn({65, 17, 3, 5}).contiguous(of_values),
          at::randn({65, 17, 3, 5}).contiguous(of_stored)};
      const at::Tensor stored = at::randn({65, 17, 3, 5}).contiguous(of_stored);
      const auto expected = plain_update(rule, values, stored, at::kFloat);
      sum_strided(values_of(values), stored, at::kFloat, rule);
      EXPECT_TRUE(same_bits(stored, expected));
    }
  }
}

// Above the size of a block of copies, along an inner and an outer dimension.
TEST(SumStridedTest, LargeTransposedValuesWithState) {
  at::manual_seed(0);
  RuleStep step = sgd_step(0.1, 0.01);
  step.rule.momentum = 0.9;
  step.is_first = false;
  const auto transposed = [](at::IntArrayRef shape) {
    return shape.size() == 2
        ? at::randn({shape[1], shape[0]}).t()
        : at::randn(shape).contiguous(at::MemoryFormat::ChannelsLast);
  };
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{2100, 1101}, {601, 41, 3, 3}}) {
    const Tensors values{transposed(shape), transposed(shape)};
    const Tensors dense{values[0].contiguous(), values[1].contiguous()};
    const at::Tensor stored = at::randn(shape).to(at::kHalf);
    const at::Tensor expected = stored.clone();
    const at::Tensor master = stored.to(at::kFloat);
    const at::Tensor momentum = at::randn(shape);
    const at::Tensor expected_master = master.clone();
    const at::Tensor expected_momentum = momentum.clone();
    sum_strided(
        values_of(values),
        stored,
        at::kFloat,
        step,
        testing::state_line({momentum}, master));
    SumBatch batch;
    batch.add(
        {values_of(dense),
         expected,
         at::kFloat,
         step,
         testing::state_line({expected_momentum}, expected_master)});
    batch.run();
    EXPECT_TRUE(same_bits(stored, expected));
    EXPECT_TRUE(same_bits(master, expected_master));
    EXPECT_TRUE(same_bits(momentum, expected_momentum));
  }
}

} // namespace
} // namespace torchkv

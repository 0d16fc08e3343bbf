// The CUDA kernels, carried out on the host: the bits of the CPU's kernels, for
// every dtype, number of values, rule, size and alignment, packed into launches
// as for a GPU. NaNs compare as NaN.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "emulated_table.h"
#include "kernels/cpu/sum.h"
#include "kernels/cuda/pack.h"
#include "rule_cases.h"

namespace torchkv {
namespace {

using kernels::cpu::SumBatch;
using kernels::cuda::Dtype;
using kernels::cuda::kLargeParams;
using kernels::cuda::kMediumParams;
using kernels::cuda::kNormChunk;
using kernels::cuda::kSmallParams;
using kernels::cuda::Launches;
using kernels::cuda::SumJob;
using testing::emulated_error;
using testing::emulated_launches;
using testing::emulated_table;
using testing::RuleCase;

using Random = std::mt19937_64;

constexpr int kMultiprocessors = 2;
constexpr int64_t kNumValues[] = {1, 2, 3, 4, 5, 8, 9, 17};
constexpr int64_t kSizes[] = {0, 1, 3, 7, 4097};

Dtype dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kComplexFloat:
      return Dtype::kFloat;
    case at::kDouble:
      return Dtype::kDouble;
    case at::kHalf:
      return Dtype::kHalf;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kBool:
      return Dtype::kBool;
    case at::kChar:
    case at::kByte:
      return Dtype::kInt8;
    case at::kShort:
      return Dtype::kInt16;
    case at::kInt:
      return Dtype::kInt32;
    default:
      EXPECT_EQ(dtype, at::kLong);
      return Dtype::kInt64;
  }
}

// Memory with a tensor in it, which begins some elements after a word and has
// something before and after it that must stay.
struct Block {
  at::Tensor memory;
  int64_t offset = 0;
  int64_t size = 0;

  at::Tensor tensor() const {
    return memory.slice(0, 16 + offset, 16 + offset + size);
  }
  void* data() const {
    return memory.defined() ? tensor().mutable_data_ptr() : nullptr;
  }
};

// Numbers to take some of: of all sizes, and special ones among them.
const at::Tensor& pool_of(at::ScalarType dtype) {
  static constexpr int64_t kSize = int64_t{1} << 21;
  static const at::Tensor numbers = [] {
    constexpr double kSpecial[] = {
        INFINITY, -INFINITY, NAN, -0.0, 0.0, 1e-310, -1e-42, 3.3e38, -1e300};
    at::manual_seed(0);
    const at::Tensor exponents = at::randint(-4, 4, kSize).to(at::kDouble);
    const at::Tensor pool = at::randn(kSize, at::kDouble) * exponents.exp2();
    for (const double special : kSpecial) {
      pool.masked_fill_(at::rand(kSize).lt(1. / 256), special);
    }
    return pool;
  }();
  static std::map<at::ScalarType, at::Tensor> pools;
  at::Tensor& pool = pools[dtype];
  if (!pool.defined()) {
    pool = c10::isFloatingType(dtype) ? numbers.to(dtype)
        : dtype == at::kBool          ? numbers.gt(0)
                                      : numbers.view(dtype).slice(0, 0, kSize);
  }
  return pool;
}

enum class Numbers : uint8_t { kAny, kNotNegative, kNan };

Block make_block(
    Random& random,
    at::ScalarType dtype,
    int64_t size,
    int64_t offset,
    Numbers numbers = Numbers::kAny) {
  const at::Tensor& pool = pool_of(dtype);
  const int64_t length = size + 48;
  const auto first = static_cast<int64_t>(random() % (pool.numel() - length));
  Block block{pool.slice(0, first, first + length).clone(), offset, size};
  if (numbers == Numbers::kNotNegative) {
    block.memory.abs_();
  } else if (numbers == Numbers::kNan) {
    block.memory.fill_(NAN);
  }
  return block;
}

// One sum, and all that it touches.
struct Key {
  at::ScalarType value_dtype = at::kFloat;
  std::vector<Block> values;
  Block stored;
  Block master;
  std::array<Block, kMaxStates> states;
  RuleStep step;
  bool first_is_sum = false;
  bool first_is_stored = false;

  std::vector<Block*> written() {
    return {&stored, &master, &states[0], &states[1], &states[2]};
  }
  // With memory of its own for what is written.
  Key clone() const {
    Key copy = *this;
    for (auto* block : copy.written()) {
      block->memory =
          block->memory.defined() ? block->memory.clone() : at::Tensor();
    }
    if (first_is_stored) {
      copy.values[0] = copy.stored;
    }
    return copy;
  }
};

struct Options {
  at::ScalarType value = at::kFloat;
  at::ScalarType stored = at::kFloat;
  int64_t num_values = 1;
  int64_t size = 0;
  RuleStep step = kAssignStep;
  bool has_master = true; // of a stored value that rounds
  bool first_is_sum = false;
  uint64_t misaligned = 0; // bits: the stored value, the master, states, values
};

Key make_key(Random& random, const Options& options) {
  Key key;
  auto offset = [&, place = 0]() mutable {
    return static_cast<int64_t>(options.misaligned >> (place++ % 64) & 1U);
  };
  key.value_dtype = options.value;
  key.step = options.step;
  key.first_is_sum = options.first_is_sum;
  const bool is_assign = options.step.rule.id == RuleSpec::Id::kAssign;
  // What an assignment overwrites means nothing.
  key.stored = make_block(
      random,
      options.stored,
      options.size,
      offset(),
      is_assign && c10::isFloatingType(options.stored) ? Numbers::kNan
                                                       : Numbers::kAny);
  const auto state_dtype = at::toOpMathType(options.stored);
  const int64_t master_offset = offset();
  if (!is_assign) {
    if (state_dtype != options.stored && options.has_master) {
      key.master = make_block(random, state_dtype, options.size, master_offset);
    }
    const auto names = state_names(options.step.rule);
    for (size_t i = 0; i < kMaxStates; ++i) {
      if (names[i] == nullptr) {
        continue;
      }
      const std::string name = names[i];
      const bool is_average =
          name == "exp_avg" || name == "grad_avg" || name == "momentum_buffer";
      const bool is_new = options.step.is_first && name == "momentum_buffer" &&
          options.step.rule.id == RuleSpec::Id::kSgd;
      key.states[i] = make_block(
          random,
          state_dtype,
          options.size,
          offset(),
          is_new           ? Numbers::kNan
              : is_average ? Numbers::kAny
                           : Numbers::kNotNegative);
    }
  }
  for (int64_t k = 0; k < options.num_values; ++k) {
    key.values.push_back(make_block(
        random,
        k == 0 && options.first_is_sum ? at::toOpMathType(options.value)
                                       : options.value,
        options.size,
        offset()));
  }
  return key;
}

void run_on_cpu(const std::vector<Key>& keys) {
  SumBatch batch;
  std::vector<std::vector<at::Tensor>> tensors;
  for (const auto& key : keys) {
    auto& values = tensors.emplace_back();
    for (const auto& value : key.values) {
      values.push_back(value.tensor());
    }
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    const Key& key = keys[i];
    std::vector<Value> values;
    for (const auto& tensor : tensors[i]) {
      values.push_back(Value(&tensor));
    }
    kernels::cpu::State state;
    if (key.master.memory.defined()) {
      state.master = key.master.tensor();
    }
    for (size_t s = 0; s < kMaxStates; ++s) {
      if (key.states[s].memory.defined()) {
        state.states[s] = key.states[s].tensor();
      }
    }
    batch.add(
        values,
        key.stored.tensor(),
        at::toOpMathType(key.value_dtype),
        key.step,
        state);
  }
  batch.run();
}

SumJob job_of(const Key& key, std::vector<const void*>& values) {
  SumJob job;
  job.value = dtype_of(key.value_dtype);
  job.stored_dtype = dtype_of(key.stored.memory.scalar_type());
  job.first_is_sum = key.first_is_sum;
  values.clear();
  for (const auto& value : key.values) {
    values.push_back(value.data());
  }
  job.values = values.data();
  job.num_values = values.size();
  job.stored = key.stored.data();
  job.master = key.master.data();
  for (size_t s = 0; s < kMaxStates; ++s) {
    job.states[s] = key.states[s].data();
  }
  job.num_elements = key.stored.size;
  job.step = &key.step;
  return job;
}

void run_on_gpu(
    const std::vector<Key>& keys,
    size_t params_bytes = kLargeParams,
    int num_multiprocessors = kMultiprocessors) {
  emulated_launches().clear();
  Launches launches(emulated_table(params_bytes), num_multiprocessors, nullptr);
  std::vector<const void*> values;
  for (const auto& key : keys) {
    const SumJob job = job_of(key, values);
    ASSERT_TRUE(Launches::supports(job));
    launches.add(job);
    values.assign(values.size(), nullptr); // it keeps no arrays
  }
  EXPECT_EQ(launches.finish(), 0);
}

template <typename T>
bool same_numbers(const at::Tensor& a, const at::Tensor& b) {
  const auto* x = a.const_data_ptr<T>();
  const auto* y = b.const_data_ptr<T>();
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (std::memcmp(x + i, y + i, sizeof(T)) != 0 &&
        (x[i] == x[i] || y[i] == y[i])) {
      return false;
    }
  }
  return true;
}

// All of the memory, also around the tensor.
bool same_bits(const Block& a, const Block& b) {
  if (!a.memory.defined()) {
    return true;
  }
  switch (a.memory.scalar_type()) {
    case at::kFloat:
      return same_numbers<float>(a.memory, b.memory);
    case at::kDouble:
      return same_numbers<double>(a.memory, b.memory);
    case at::kHalf:
      return same_numbers<at::Half>(a.memory, b.memory);
    case at::kBFloat16:
      return same_numbers<at::BFloat16>(a.memory, b.memory);
    default:
      return std::memcmp(
                 a.memory.const_data_ptr(),
                 b.memory.const_data_ptr(),
                 a.memory.nbytes()) == 0;
  }
}

void expect_same(std::vector<Key>& actual, std::vector<Key>& expected) {
  for (size_t i = 0; i < actual.size(); ++i) {
    const auto a = actual[i].written();
    const auto b = expected[i].written();
    for (size_t k = 0; k < a.size(); ++k) {
      ASSERT_TRUE(same_bits(*a[k], *b[k]))
          << (k == 0       ? "value"
                  : k == 1 ? "master"
                           : "state")
          << " of " << actual[i].stored.size << ' '
          << actual[i].stored.memory.dtype() << " out of "
          << actual[i].values.size() << ' ' << actual[i].value_dtype << ", "
          << name_of(actual[i].step.rule) << " at step " << actual[i].step.step
          << ", key " << i;
    }
  }
}

void gpu_equals_cpu(
    const std::vector<Key>& keys,
    size_t params_bytes = kLargeParams,
    int num_multiprocessors = kMultiprocessors) {
  std::vector<Key> actual;
  std::vector<Key> expected;
  for (const auto& key : keys) {
    actual.push_back(key.clone());
    expected.push_back(key.clone());
  }
  run_on_cpu(expected);
  run_on_gpu(actual, params_bytes, num_multiprocessors);
  expect_same(actual, expected);
}

// Steps of a rule, whose gradients are handled in different ways.
std::vector<RuleStep> steps_of(const RuleSpec& rule) {
  RuleStep first;
  first.rule = rule;
  RuleStep later = first;
  later.step = 7;
  later.is_first = false;
  RuleStep scaled = later;
  scaled.scale = 0.375;
  RuleStep clipped = later;
  clipped.scale = 2;
  clipped.clip_value = 0.5;
  clipped.last_scale = 0.3;
  return {first, later, scaled, clipped};
}

struct Dtypes {
  at::ScalarType value;
  at::ScalarType stored;
};

void PrintTo(const Dtypes& dtypes, std::ostream* out) {
  *out << dtypes.value << " into " << dtypes.stored;
}

std::string name_of_dtypes(const ::testing::TestParamInfo<Dtypes>& info) {
  return std::string(c10::toString(info.param.value)) + "Into" +
      c10::toString(info.param.stored);
}

const std::vector<Dtypes> kFloating{
    {at::kFloat, at::kFloat},
    {at::kHalf, at::kHalf},
    {at::kBFloat16, at::kBFloat16},
    {at::kDouble, at::kDouble},
    {at::kHalf, at::kFloat},
    {at::kBFloat16, at::kFloat}};

const std::vector<Dtypes> kIntegers{
    {at::kBool, at::kBool},
    {at::kByte, at::kByte},
    {at::kChar, at::kChar},
    {at::kShort, at::kShort},
    {at::kInt, at::kInt},
    {at::kLong, at::kLong}};

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

TEST(CudaAssignTest, BytesThatAreNoBool) {
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
  Launches launches(emulated_table(), kMultiprocessors, nullptr);
  launches.add(job);
  EXPECT_EQ(launches.finish(), 0);
  EXPECT_TRUE(at::equal(stored, tensors[0] + tensors[1]));
}

// A sum of halves goes on in fp32, in the place where it is.
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

class CudaRuleTest : public ::testing::TestWithParam<RuleCase> {};

TEST_P(CudaRuleTest, EqualsTheCpu) {
  Random random(0);
  for (const auto& dtypes : kFloating) {
    for (const auto& step : steps_of(GetParam().rule)) {
      std::vector<Key> keys;
      for (const int64_t num_values : kNumValues) {
        for (const int64_t size : kSizes) {
          Options options{dtypes.value, dtypes.stored, num_values, size, step};
          keys.push_back(make_key(random, options));
          options.misaligned = random();
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
  for (const auto& dtypes : kFloating) {
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
  for (const auto& dtypes : kFloating) {
    for (const int64_t num_values : {1, 3}) {
      Options options{dtypes.value, dtypes.stored, num_values, 65541};
      options.step = steps_of(GetParam().rule)[3];
      gpu_equals_cpu({make_key(random, options)});
    }
  }
}

std::vector<RuleCase> rules_with_kernels() {
  std::vector<RuleCase> cases;
  for (const auto& rule : testing::rule_cases()) {
    if (rule.rule.id != RuleSpec::Id::kLamb) {
      cases.push_back(rule);
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(
    All,
    CudaRuleTest,
    ::testing::ValuesIn(rules_with_kernels()),
    [](const auto& info) { return info.param.name; });

// --- Launches

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
      options.step =
          steps_of(rules[random() % rules.size()].rule)[random() % 4];
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

std::vector<Key> momentum_keys(int num_keys, int64_t size) {
  Random random(0);
  RuleSpec sgd;
  sgd.id = RuleSpec::Id::kSgd;
  sgd.lr = 0.1;
  sgd.momentum = 0.9;
  Options options{at::kFloat, at::kFloat, 2, size};
  std::vector<Key> keys;
  for (int i = 0; i < num_keys; ++i) {
    options.step.rule = sgd;
    options.step.rule.weight_decay = i % 2 == 0 ? 0.01 : 0;
    keys.push_back(make_key(random, options));
  }
  return keys;
}

TEST(CudaLaunchesTest, ManyKeysInOneLaunch) {
  const auto keys = momentum_keys(161, 100);
  gpu_equals_cpu(keys);
  ASSERT_EQ(emulated_launches().size(), 1U);
  EXPECT_EQ(emulated_launches()[0].head.num_keys, 161U);
  gpu_equals_cpu(keys, kSmallParams);
  EXPECT_EQ(emulated_launches().size(), 3U);
}

// The host copies them with each launch.
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

// As in a capture.
TEST(CudaLaunchesTest, ACallMayLimitItsParameters) {
  const auto keys = momentum_keys(300, 10);
  emulated_launches().clear();
  Launches launches(emulated_table(), kMultiprocessors, nullptr, kSmallParams);
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

// Words of 16 bytes where all pointers of a key allow them.
TEST(CudaLaunchesTest, AlignedKeysAreWorkedOnInWords) {
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

// A different step of each key, until they fill the parameters from both ends.
TEST(CudaLaunchesTest, KeysOfDifferentSteps) {
  auto keys = momentum_keys(600, 3);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i].step.rule.lr = 0.001 * static_cast<double>(i + 1);
  }
  for (const size_t params_bytes : {kSmallParams, kLargeParams}) {
    gpu_equals_cpu(keys, params_bytes);
  }
}

// A block for each chunk, so that the hardware balances them.
TEST(CudaLaunchesTest, ChunksKeepAllMultiprocessorsBusy) {
  // Some 2 million elements: whole chunks for one multiprocessor, pieces of one
  // for a GPU.
  const auto keys = momentum_keys(2, 1000003);
  gpu_equals_cpu(keys, kLargeParams, 1);
  ASSERT_EQ(emulated_launches().size(), 1U);
  EXPECT_EQ(emulated_launches()[0].head.chunk, 16384U);
  EXPECT_EQ(emulated_launches()[0].head.num_chunks, 124U);
  gpu_equals_cpu(keys, kLargeParams, 132);
  ASSERT_EQ(emulated_launches().size(), 1U);
  EXPECT_EQ(emulated_launches()[0].head.chunk, 2048U);
  EXPECT_EQ(emulated_launches()[0].head.num_chunks, 978U);
  gpu_equals_cpu(momentum_keys(1, 5), kLargeParams, 132);
  EXPECT_EQ(emulated_launches()[0].head.num_chunks, 1U);
}

TEST(CudaLaunchesTest, NothingIsLaunchedForNothing) {
  emulated_launches().clear();
  Launches launches(emulated_table(), kMultiprocessors, nullptr);
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
  Launches launches(emulated_table(), kMultiprocessors, nullptr);
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

TEST(CudaLaunchesTest, WhatHasNoKernel) {
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
  EXPECT_FALSE(supports(Dtype::kFloat, Dtype::kFloat, RuleSpec::Id::kLamb));
  EXPECT_FALSE(supports(Dtype::kFloat, Dtype::kBFloat16, assign));
  EXPECT_FALSE(supports(Dtype::kHalf, Dtype::kBFloat16, assign));
  EXPECT_FALSE(supports(Dtype::kFloat, Dtype::kDouble, assign));
  EXPECT_FALSE(supports(Dtype::kInt32, Dtype::kInt64, assign));
  EXPECT_TRUE(supports(Dtype::kInt32, Dtype::kInt32, assign));
  EXPECT_FALSE(supports(Dtype::kInt32, Dtype::kInt32, adam));
  EXPECT_FALSE(supports(Dtype::kBool, Dtype::kBool, adam));
  // The type in which halves are added up, and floats are already of.
  EXPECT_TRUE(supports(Dtype::kHalf, Dtype::kFloat, assign, 2, true));
  EXPECT_FALSE(supports(Dtype::kFloat, Dtype::kFloat, assign, 2, true));
  EXPECT_TRUE(supports(Dtype::kFloat, Dtype::kFloat, adam, 400));
  EXPECT_FALSE(supports(Dtype::kFloat, Dtype::kFloat, adam, 500));
}

TEST(CudaLaunchesTest, AsManyValuesAsFit) {
  Random random(0);
  Options options{at::kBFloat16, at::kBFloat16, 400, 33};
  options.step = steps_of(testing::rule_cases()[2].rule)[1];
  gpu_equals_cpu({make_key(random, options)}, kSmallParams);
}

// --- Norms

double norm_on_gpu(
    const std::vector<Key>& keys,
    double scale,
    std::vector<double>* all = nullptr) {
  Launches launches(emulated_table(), kMultiprocessors, nullptr);
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
            options.step.last_scale = 100; // which is not for norms
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

TEST(CudaNormTest, OfWhatIsNotFinite) {
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

TEST(CudaNormTest, OfNumbersThatHaveNone) {
  Random random(0);
  std::vector<const void*> values;
  const Key key = make_key(random, {at::kInt, at::kInt, 2, 10});
  EXPECT_FALSE(Launches::supports_norm(job_of(key, values)));
}

// --- Copies

TEST(CudaCopyTest, ManyCopiesOfSeveralOuts) {
  Random random(0);
  struct Copied {
    at::Tensor source;
    std::vector<at::Tensor> outs;
    std::vector<at::Tensor> expected;
  };
  for (const size_t params_bytes : {kSmallParams, kLargeParams}) {
    emulated_launches().clear();
    Launches launches(emulated_table(params_bytes), kMultiprocessors, nullptr);
    std::vector<Copied> copies(300);
    for (size_t i = 0; i < copies.size(); ++i) {
      auto& [source, outs, expected] = copies[i];
      const auto size = static_cast<int64_t>(
          i % 30 == 7 ? 70000 + random() % 100 : random() % (i % 7 * 70 + 20));
      // Bytes that begin anywhere, often all in the same way.
      const auto shift = static_cast<int64_t>(random() % 17);
      const auto unit = int64_t{1} << random() % 5;
      source = at::randint(256, size + 64, at::kByte);
      const auto num_bytes = static_cast<int64_t>(source.numel() - 64);
      auto* from = source.mutable_data_ptr<uint8_t>() + shift;
      std::vector<void*> pointers;
      for (uint64_t k = 0; k < 1 + random() % 4; ++k) {
        const auto to =
            (shift + unit * static_cast<int64_t>(random() % 3)) % 32;
        outs.push_back(at::randint(256, size + 64, at::kByte));
        expected.push_back(outs.back().clone());
        expected.back()
            .slice(0, to, to + num_bytes)
            .copy_(source.slice(0, shift, shift + num_bytes));
        pointers.push_back(outs.back().mutable_data_ptr<uint8_t>() + to);
      }
      if (random() % 8 == 0) {
        pointers.push_back(from); // onto itself
      }
      expected.push_back(source.clone());
      outs.push_back(source);
      launches.add_copy(from, pointers.data(), pointers.size(), num_bytes);
    }
    EXPECT_EQ(launches.finish(), 0);
    for (size_t i = 0; i < copies.size(); ++i) {
      for (size_t k = 0; k < copies[i].outs.size(); ++k) {
        EXPECT_TRUE(at::equal(copies[i].outs[k], copies[i].expected[k]))
            << "copy " << i << ", out " << k;
      }
    }
    for (const auto& launch : emulated_launches()) {
      EXPECT_TRUE(launch.is_copy);
      EXPECT_LE(launch.params_bytes, params_bytes);
    }
  }
}

// Words as wide as source and outs allow, once they begin at one.
TEST(CudaCopyTest, WordsAsWideAsPossible) {
  const at::Tensor bytes = at::zeros(200, at::kByte);
  auto* const data = bytes.mutable_data_ptr<uint8_t>();
  const std::vector<int> shifts{0, 8, 4, 2, 1, 16};
  emulated_launches().clear();
  Launches launches(emulated_table(), kMultiprocessors, nullptr);
  for (const int shift : shifts) {
    void* const out = data + 103 + shift;
    launches.add_copy(data + 7, &out, 1, 50);
  }
  EXPECT_EQ(launches.finish(), 0);
  EXPECT_EQ(
      emulated_launches().at(0).alignments,
      (std::vector<int>{16, 8, 4, 2, 1, 16}));
}

TEST(CudaCopyTest, MoreOutsThanOneLaunchTakes) {
  const at::Tensor source = at::arange(5);
  const at::Tensor outs = at::zeros({1200, 5}, at::kLong);
  std::vector<void*> pointers;
  for (int64_t i = 0; i < 1200; ++i) {
    pointers.push_back(outs[i].mutable_data_ptr());
  }
  Launches launches(emulated_table(kSmallParams), kMultiprocessors, nullptr);
  launches.add_copy(
      source.const_data_ptr(), pointers.data(), pointers.size(), 40);
  EXPECT_EQ(launches.finish(), 0);
  EXPECT_TRUE(at::equal(outs, source.expand({1200, 5})));
}

// One value that is merely assigned takes no arithmetic.
TEST(CudaCopyTest, AssignedValuesOfOneAreCopies) {
  Random random(0);
  gpu_equals_cpu({make_key(random, {at::kHalf, at::kHalf, 1, 10})});
  EXPECT_TRUE(emulated_launches().at(0).is_copy);
  gpu_equals_cpu({make_key(random, {at::kHalf, at::kFloat, 1, 10})});
  EXPECT_FALSE(emulated_launches().at(0).is_copy);
}

} // namespace
} // namespace torchkv

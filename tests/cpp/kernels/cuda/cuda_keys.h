// Keys with random values for the CUDA kernels, which run on the host here, and
// the comparison of the results with the CPU's kernels. NaNs compare as NaN.
#pragma once

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "emulated_table.h"
#include "kernels/cpu/sum.h"
#include "kernels/cuda/pack.h"
#include "rule_cases.h"

namespace torchkv::testing::cuda {

using kernels::cpu::SumBatch;
using kernels::cuda::Dtype;
using kernels::cuda::kLargeParams;
using kernels::cuda::Launches;
using kernels::cuda::SumJob;

using Random = std::mt19937_64;

inline constexpr int kMultiprocessors = 2;
inline constexpr int64_t kNumValues[] = {1, 2, 3, 4, 5, 8, 9, 17};
inline constexpr int64_t kSizes[] = {0, 1, 3, 7, 4097};

inline Dtype dtype_of(at::ScalarType dtype) {
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
inline const at::Tensor& pool_of(at::ScalarType dtype) {
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

inline Block make_block(
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

inline Key make_key(Random& random, const Options& options) {
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

inline void run_on_cpu(const std::vector<Key>& keys) {
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
      values.push_back(&tensor);
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

inline SumJob job_of(const Key& key, std::vector<const void*>& values) {
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

inline void run_on_gpu(
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
inline bool same_numbers(const at::Tensor& a, const at::Tensor& b) {
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
inline bool same_bits(const Block& a, const Block& b) {
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

inline void expect_same(std::vector<Key>& actual, std::vector<Key>& expected) {
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

inline void gpu_equals_cpu(
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
inline std::vector<RuleStep> steps_of(const RuleSpec& rule) {
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

inline void PrintTo(const Dtypes& dtypes, std::ostream* out) {
  *out << dtypes.value << " into " << dtypes.stored;
}

inline std::string name_of_dtypes(
    const ::testing::TestParamInfo<Dtypes>& info) {
  return std::string(c10::toString(info.param.value)) + "Into" +
      c10::toString(info.param.stored);
}

inline const std::vector<Dtypes> kFloating{
    {at::kFloat, at::kFloat},
    {at::kHalf, at::kHalf},
    {at::kBFloat16, at::kBFloat16},
    {at::kDouble, at::kDouble},
    {at::kHalf, at::kFloat},
    {at::kBFloat16, at::kFloat}};

inline const std::vector<Dtypes> kIntegers{
    {at::kBool, at::kBool},
    {at::kByte, at::kByte},
    {at::kChar, at::kChar},
    {at::kShort, at::kShort},
    {at::kInt, at::kInt},
    {at::kLong, at::kLong}};

inline std::vector<RuleCase> rules_with_kernels() {
  std::vector<RuleCase> cases;
  for (const auto& rule : testing::rule_cases()) {
    if (rule.rule.id != RuleSpec::Id::kLamb) {
      cases.push_back(rule);
    }
  }
  return cases;
}

inline std::vector<Key> momentum_keys(int num_keys, int64_t size) {
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

} // namespace torchkv::testing::cuda

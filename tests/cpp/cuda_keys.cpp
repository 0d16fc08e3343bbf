#include "cuda_keys.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <cmath>
#include <cstring>
#include <map>

#include "emulated_table.h"
#include "kernels/cpu/sum.h"
#include "state_line.h"

namespace torchkv::testing {

using kernels::cpu::SumBatch;
using kernels::cuda::Dtype;
using kernels::cuda::Launches;
using kernels::cuda::SumJob;

namespace {

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

// A pool of numbers of all magnitudes, with special values among them.
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

} // namespace

Key make_key(Random& random, const Options& options) {
  Key key;
  auto offset = [&, place = 0]() mutable {
    return static_cast<int64_t>(options.misaligned >> (place++ % 64) & 1U);
  };
  key.value_dtype = options.value;
  key.step = options.step;
  key.first_is_sum = options.first_is_sum;
  const RuleSpec& rule = options.step.rule;
  const bool is_assign = rule.id == RuleSpec::Id::kAssign;
  // ASSIGN must not read the stored value.
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
    // The CPU's kernels have a master for norms, which follows writes before.
    if (state_dtype != options.stored &&
        (options.has_master || has_norms(rule))) {
      key.master = make_block(random, state_dtype, options.size, master_offset);
      key.follows_writes = options.follows_writes && !has_norms(rule);
      // Each second number is as the step before left it.
      const at::Tensor stored = key.stored.tensor().slice(0, 0, {}, 2);
      stored.copy_(key.master.tensor().slice(0, 0, {}, 2));
    }
    const auto names = state_names(rule);
    for (size_t i = 0; i < kMaxStates; ++i) {
      if (names[i] == nullptr) {
        continue;
      }
      const std::string name = names[i];
      const bool is_average =
          name == "exp_avg" || name == "grad_avg" || name == "momentum_buffer";
      const bool is_new = options.step.is_first && name == "momentum_buffer" &&
          rule.id == RuleSpec::Id::kSgd;
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
  job.follows_writes = key.follows_writes;
  for (size_t s = 0; s < kMaxStates; ++s) {
    job.states[s] = key.states[s].data();
  }
  job.num_elements = key.stored.size;
  job.step = &key.step;
  return job;
}

kernels::cpu::StateLine state_of(const Key& key) {
  const auto tensor_of = [](const Block& block) {
    return block.memory.defined() ? block.tensor() : at::Tensor();
  };
  std::array<at::Tensor, kMaxStates> states;
  std::transform(
      key.states.begin(), key.states.end(), states.begin(), tensor_of);
  auto line = state_line(states, tensor_of(key.master));
  line.follows_writes = key.follows_writes;
  return line;
}

namespace {

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
    const at::Tensor stored = key.stored.tensor();
    batch.add(
        {values,
         stored,
         at::toOpMathType(key.value_dtype),
         key.step,
         state_of(key)});
  }
  batch.run();
}

void run_on_gpu(const std::vector<Key>& keys, size_t params_bytes) {
  emulated_launches().clear();
  Launches launches(emulated_table(params_bytes), nullptr);
  std::vector<const void*> values;
  std::vector<std::vector<double>> numbers;
  for (const auto& key : keys) {
    const SumJob job = job_of(key, values);
    ASSERT_TRUE(Launches::supports(job));
    if (has_norms(key.step.rule)) {
      const auto count = static_cast<size_t>(Launches::num_numbers(job));
      auto& block = numbers.emplace_back(count + 1, NAN);
      launches.add_with_norms(job, block.data());
    } else {
      launches.add(job);
    }
    values.assign(values.size(), nullptr); // add() has copied them
  }
  EXPECT_EQ(launches.finish(), 0);
  for (const auto& block : numbers) {
    EXPECT_TRUE(std::isnan(block.back())); // behind its memory
  }
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

// All of the memory, including that around the tensor.
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

} // namespace

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

void gpu_equals_cpu(const std::vector<Key>& keys, size_t params_bytes) {
  std::vector<Key> actual;
  std::vector<Key> expected;
  for (const auto& key : keys) {
    actual.push_back(key.clone());
    expected.push_back(key.clone());
  }
  run_on_cpu(expected);
  run_on_gpu(actual, params_bytes);
  expect_same(actual, expected);
}

std::vector<RuleCase> rules_with_kernels() {
  std::vector<RuleCase> cases;
  for (const auto& rule : rule_cases()) {
    if (!is_row_wise(rule.rule)) {
      cases.push_back(rule);
    }
  }
  return cases;
}

} // namespace torchkv::testing

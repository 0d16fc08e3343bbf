#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "core/rule.h"
#include "kernels/cpu/lines.h"
#include "kernels/cuda/pack.h"
#include "rule_cases.h"

// Random keys with all their tensors, for tests that compare the CUDA kernels
// on the host (emulated_table.h) with the CPU kernels.
namespace torchkv::testing {

using Random = std::mt19937_64;

constexpr int64_t kNumValues[] = {1, 2, 3, 4, 5, 8, 9, 17};

// A tensor at an offset of some elements from an aligned word, with memory
// before and after it that must not change.
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

// One sum with all its tensors.
struct Key {
  at::ScalarType value_dtype = at::kFloat;
  std::vector<Block> values;
  Block stored;
  Block master;
  std::array<Block, kMaxStates> states;
  RuleStep step;
  bool first_is_sum = false;
  bool first_is_stored = false;
  bool follows_writes = false;

  std::vector<Block*> written() {
    return {&stored, &master, &states[0], &states[1], &states[2]};
  }
  // Copies the memory that is written.
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
  bool has_master = true; // if the stored dtype is rounded
  bool follows_writes = false; // if there is a master
  bool first_is_sum = false;
  uint64_t misaligned = 0; // bits: the stored value, the master, states, values
};

Key make_key(Random& random, const Options& options);

// Two values of fp32 and SGD with momentum, of two alternating options.
std::vector<Key> momentum_keys(int num_keys, int64_t size);

// `values` receives the pointers that the job refers to.
kernels::cuda::SumJob job_of(const Key& key, std::vector<const void*>& values);

// The memory of a key's state, for the CPU kernels.
kernels::cpu::StateLine state_of(const Key& key);

// Expects the same bits in all that is written, and around it. NaNs compare
// equal.
void expect_same(std::vector<Key>& actual, std::vector<Key>& expected);

// Expects the same bits from the CPU kernels and from the CUDA kernels on the
// host, also around the tensors. NaNs compare equal.
void gpu_equals_cpu(
    const std::vector<Key>& keys,
    size_t params_bytes = kernels::cuda::kLargeParams);

// All but those that step rows.
std::vector<RuleCase> rules_with_kernels();

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

} // namespace torchkv::testing

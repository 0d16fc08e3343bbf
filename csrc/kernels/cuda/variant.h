#pragma once

#include <cstdint>

#include "../rules.h"

// Which kernels there are, and the blocks that they are launched in: part of
// the ABI of params.h.
namespace torchkv::kernels::cuda {

constexpr uint32_t kThreads = 256; // of a block

// A block processes one chunk of a key. There are as many blocks as chunks, for
// large values many more than run concurrently: the hardware starts one
// whenever another ends, which balances the load. On an H200, chunks of 16384
// elements take 5 to 15 % longer.
constexpr int64_t kChunk = 2048; // elements
constexpr int64_t kChunkOfHalves = 4096; // likewise, of a sum alone
constexpr int64_t kCopyChunk = 16384; // bytes
constexpr int64_t kNormChunk = 8192; // elements

// A complex number is two real ones. Signed integers are added as unsigned.
enum class Dtype : uint8_t {
  kFloat,
  kHalf,
  kBFloat16,
  kDouble,
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
};

constexpr bool is_floating(Dtype dtype) {
  return dtype <= Dtype::kDouble;
}
constexpr bool is_half(Dtype dtype) {
  return dtype == Dtype::kHalf || dtype == Dtype::kBFloat16;
}

// The rules with specialized kernels, and all other elementwise ones. A norm
// stores only the sum of squares of each chunk. A rule that has_norms() takes
// three launches: kMeasure stores the Squares of each chunk and, of LAMB, the
// new state; launch_rates adds them up; kScaled steps, LAMB's without values.
enum class Rule : uint8_t {
  kAssign,
  kSgd,
  kAdam,
  kOther,
  kNorm,
  kMeasure,
  kScaled,
};

constexpr Rule rule_of(RuleSpec::Id id) {
  switch (id) {
    case RuleSpec::Id::kAssign:
      return Rule::kAssign;
    case RuleSpec::Id::kSgd:
      return Rule::kSgd;
    case RuleSpec::Id::kAdam:
      return Rule::kAdam;
    default:
      return Rule::kOther;
  }
}

constexpr bool has_numbers(Rule rule) {
  return rule == Rule::kMeasure || rule == Rule::kScaled;
}

// The number of state pointers in a Key, besides the master.
constexpr uint32_t num_states(Rule rule) {
  return rule == Rule::kAssign || rule == Rule::kNorm ? 0
      : rule == Rule::kSgd                            ? 1
      : has_numbers(rule)                             ? 2
                                                      : kMaxStates;
}

// Whether a key has a Step, and whether the kernel reads a weight.
constexpr bool has_step(Rule rule) {
  return rule != Rule::kAssign;
}
constexpr bool has_weight(Rule rule) {
  return rule != Rule::kAssign && rule != Rule::kNorm;
}
// Of a Key, excluding its values.
constexpr uint32_t num_pointers(Rule rule) {
  return (has_weight(rule) ? 1 + num_states(rule) : 0) + has_numbers(rule);
}

// Selects a kernel.
struct Variant {
  Dtype value;
  Dtype stored;
  Rule rule;
  uint8_t num_values; // of each key; 0 = any number
};

// Whether there is such a kernel. ASSIGN of one value is a copy.
constexpr bool is_built(const Variant& variant) {
  const bool is_any = variant.num_values == 0;
  if (!is_floating(variant.value)) {
    return variant.stored == variant.value && variant.rule == Rule::kAssign &&
        is_any;
  }
  if (variant.rule == Rule::kNorm) {
    return variant.stored == variant.value &&
        (is_any || variant.num_values == 1);
  }
  if (variant.stored != variant.value) {
    return is_half(variant.value) && variant.stored == Dtype::kFloat && is_any;
  }
  if (has_numbers(variant.rule)) { // squares of fp64 may be out of range
    return is_any && variant.value != Dtype::kDouble;
  }
  if (variant.value == Dtype::kDouble || variant.rule == Rule::kOther) {
    return is_any;
  }
  return is_any || (variant.num_values == 1 && variant.rule != Rule::kAssign) ||
      variant.num_values == 2 || variant.num_values == 3 ||
      variant.num_values == 4 || variant.num_values == 8;
}

// Whether there is a kernel for steps of rows: all of one dtype, or values in
// the type of the weight's arithmetic, or halves for fp32 weights.
constexpr bool steps_rows(Dtype value, Dtype stored) {
  return is_floating(value) && is_floating(stored) &&
      (value == stored || (value == Dtype::kFloat && is_half(stored)) ||
       (is_half(value) && stored == Dtype::kFloat));
}

// Concurrent blocks per multiprocessor: 5, 4, 3 or 2 leave 48, 64, 80 or 128
// registers for each thread.
constexpr uint32_t blocks_per_multiprocessor(const Variant& variant) {
  if (has_weight(variant.rule)) {
    if (variant.value == Dtype::kDouble) {
      return 2;
    }
    const bool is_light =
        variant.rule == Rule::kSgd || has_numbers(variant.rule);
    if (variant.num_values == 8 || (variant.num_values == 0 && !is_light)) {
      return 3;
    }
  }
  // The others are as fast with four, or spill with five.
  const bool gains =
      variant.rule == Rule::kAssign || variant.rule == Rule::kAdam;
  const bool is_few = variant.num_values != 0 && variant.num_values <= 4;
  return gains && is_few ? 5 : 4;
}

constexpr int64_t chunk_of(const Variant& variant) {
  if (variant.rule == Rule::kNorm || variant.rule == Rule::kMeasure) {
    return kNormChunk;
  }
  return is_half(variant.value) && !has_weight(variant.rule) ? kChunkOfHalves
                                                             : kChunk;
}

constexpr uint32_t kCopyBlocksPerMultiprocessor = 4;
constexpr uint32_t kSendBlocksPerMultiprocessor = 4;
constexpr uint32_t kRowBlocksPerMultiprocessor = 4;
constexpr uint32_t kRowStepBlocksPerMultiprocessor = 3;
// More would exceed the threads of a multiprocessor of Turing.
static_assert(kThreads * kCopyBlocksPerMultiprocessor <= 1024);
static_assert(kThreads * kSendBlocksPerMultiprocessor <= 1024);
static_assert(kThreads * kRowBlocksPerMultiprocessor <= 1024);
static_assert(kThreads * kRowStepBlocksPerMultiprocessor <= 1024);

} // namespace torchkv::kernels::cuda

#pragma once

#include <cstddef>
#include <cstdint>

#include "../../core/export.h"
#include "../rules.h"

// What libtorchkv and libtorchkv_cuda agree on: plain data and a table of C
// functions, so that the first needs no CUDA header and the second no torch.
//
// A launch works on many keys. Everything that it must know travels in the
// parameters of the kernel, which lie in a constant bank of the GPU: no copy
// and no synchronization ahead of it.
//
//   Params.bank:  Key 0 | Key 1 | ...  (free)  ... | Step 1 | Step 0
//   Key:          KeyHead | master, states (of a rule) | values
//   copy's Key:   KeyHead | outs
namespace torchkv::kernels::cuda {

// Raised with every change of this file.
constexpr uint32_t kAbi = 2;

constexpr uint32_t kThreads = 256; // of a block

// A block works on one chunk of a key: a power of two of elements, chosen so
// that all multiprocessors get some. Of a copy, of four bytes each. There are
// as many blocks as chunks, many times more than run at once where values are
// large: the hardware starts one wherever another ends, so that all
// multiprocessors stay busy until the last few.
constexpr int64_t kMinChunk = 2048;
constexpr int64_t kMaxChunk = 16384;
// Of a norm: the same on every GPU, and so are the bits.
constexpr int64_t kNormChunk = 8192;

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

// The rules that have kernels of their own, and all the others. A norm stores
// nothing but the sums of its chunks' squares.
enum class Rule : uint8_t { kAssign, kSgd, kAdam, kOther, kNorm };

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

// Places for state in a Key, beside that for the master.
constexpr uint32_t num_states(Rule rule) {
  return rule == Rule::kAssign || rule == Rule::kNorm ? 0
      : rule == Rule::kSgd                            ? 1
                                                      : kMaxStates;
}

// Whether a key has a Step, and whether the kernel reads and writes a weight.
constexpr bool has_step(Rule rule) {
  return rule != Rule::kAssign;
}
constexpr bool has_weight(Rule rule) {
  return rule != Rule::kAssign && rule != Rule::kNorm;
}

// Which kernel.
struct Variant {
  Dtype value;
  Dtype stored;
  Rule rule;
  uint8_t num_values; // of a key; 0 = any number
};

// Whether there is such a kernel. One value that is merely assigned is a copy.
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
  if (variant.value == Dtype::kDouble || variant.rule == Rule::kOther) {
    return is_any;
  }
  return is_any || (variant.num_values == 1 && variant.rule != Rule::kAssign) ||
      variant.num_values == 2 || variant.num_values == 3 ||
      variant.num_values == 4 || variant.num_values == 8;
}

// Blocks of a multiprocessor in flight. The fewer, the more registers each
// thread has: 64, 80 or 128.
constexpr uint32_t blocks_per_multiprocessor(const Variant& variant) {
  if (!has_weight(variant.rule)) {
    return 4;
  }
  if (variant.value == Dtype::kDouble) {
    return 2;
  }
  if (variant.num_values == 8) {
    return 3;
  }
  return variant.num_values == 0 && variant.rule != Rule::kSgd ? 3 : 4;
}
constexpr uint32_t kCopyBlocksPerMultiprocessor = 4;

struct KeyHead {
  uint32_t chunk_end; // in the chunks of the launch
  uint16_t step; // which Step
  // Of a sum: 16 where every pointer is a multiple of it, else 1. Of a copy:
  // pointers are multiples of it, once `head` bytes are done.
  uint8_t alignment;
  uint8_t head;
  int64_t size; // elements of a sum, bytes of a copy
  // What is stored by a sum; of a norm, a double for each chunk; the source of
  // a copy.
  void* memory;
};

// What a rule does with a key; T is the type of its arithmetic.
template <typename T>
struct Step {
  explicit Step(const RuleStep& call)
      : numbers(call),
        scale(static_cast<T>(call.scale)),
        limit(
            call.clip_value > 0 ? static_cast<T>(call.clip_value)
                                : static_cast<T>(INFINITY)),
        last_scale(
            static_cast<T>(
                call.rule.maximize ? -call.last_scale : call.last_scale)),
        id(call.rule.id),
        decoupled(call.rule.decoupled) {}

  RuleNumbers<T> numbers;
  T scale;
  T limit;
  T last_scale;
  RuleSpec::Id id;
  bool decoupled;
};

struct ParamsHead {
  uint32_t num_keys;
  uint32_t num_chunks;
  uint32_t chunk; // elements of a sum, bytes of a copy
  uint16_t key_bytes;
  uint16_t num_values; // of a sum; of a copy, outs
  // The first value is a sum already, in the type of the arithmetic.
  bool first_is_sum;
  double scale; // of a norm: what each number is multiplied by
};

// A kernel's parameters: the smallest that the keys fit into, for the host
// copies all of it with each launch. More than 4096 bytes need a driver of R530
// and no CUDA graph: PyTorch refuses them in a capture, and graphs with them
// have crashed elsewhere.
template <size_t kBytes>
struct Params {
  ParamsHead head;
  alignas(8) char bank[kBytes - (sizeof(ParamsHead) + 7) / 8 * 8];
};
constexpr size_t kSmallParams = 4096;
constexpr size_t kMediumParams = 12288;
constexpr size_t kLargeParams = 32760; // 32764 less what is no multiple of 8

static_assert(sizeof(Params<kSmallParams>) == kSmallParams);
static_assert(sizeof(Params<kMediumParams>) == kMediumParams);
static_assert(sizeof(Params<kLargeParams>) == kLargeParams);

// libtorchkv_cuda. Functions return a cudaError_t, of what they did themselves:
// an older error of other code that nobody has asked for stays where it is. The
// device that they work with is the current one, `stream` a cudaStream_t of it.
struct Table {
  uint32_t abi;
  uint32_t params_bytes; // kLargeParams, or kSmallParams for an old driver

  // `params` is a Params<params_bytes>, of one of the sizes, and is copied. A
  // block for each of its chunks.
  int (*launch_sum)(
      Variant variant,
      const void* params,
      size_t params_bytes,
      void* stream);
  int (*launch_copy)(const void* params, size_t params_bytes, void* stream);
  int (*num_multiprocessors)(int device, int* result);
  // Whether the kernels were compiled for the current device.
  int (*has_code)(bool* result);
  int (*is_capturing)(void* stream, bool* result);
  // Lets kernels on `device` use the memory of `peer`; also where they may
  // already. cudaErrorPeerAccessUnsupported where they never can.
  int (*enable_peer)(int device, int peer);
  const char* (*error_string)(int error);
};

} // namespace torchkv::kernels::cuda

// What libtorchkv_cuda exports.
extern "C" TORCHKV_API const torchkv::kernels::cuda::Table* torchkv_cuda_table();

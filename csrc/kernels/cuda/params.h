#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "../../core/codec.h"
#include "../../core/export.h"
#include "../rules.h"
#include "variant.h"

// The ABI between libtorchkv and libtorchkv_cuda: plain data and a table of C
// functions, so that the first needs no CUDA header and the second no torch.
//
// A launch processes many keys. All its inputs are in the parameters of the
// kernel, which the GPU keeps in a constant bank, so it needs no copy and no
// synchronization before it.
//
//   Params.bank:  Key 0 | Key 1 | ...  (free)  ... | Step 1 | Step 0
//   Key:          KeyHead | master, states (of a rule), numbers (of one with
//                 norms) | values
//   copy's Key:   KeyHead | outs
//   rates' Key:   KeyHead | sums of squares
namespace torchkv::kernels::cuda {

// Incremented with every change of this file or variant.h.
constexpr uint32_t kAbi = 15;

struct KeyHead {
  uint32_t chunk_end; // among the chunks of the launch
  uint16_t step; // index of the Step
  // For a sum, 16 if every pointer is a multiple of it, else 1. For a copy, all
  // pointers plus `head` bytes are multiples of it.
  uint8_t alignment;
  uint8_t head : 7; // of a copy, else 0
  uint8_t follows_writes : 1; // as cpu::StateLine
  int64_t size; // of a sum in elements, of a copy in bytes
  // The stored value of a sum; for a norm, one double per chunk; the source of
  // a copy; the rate, a double.
  void* memory;
};

// Of the numbers of a chunk: the weights, and what a rule that has_norms()
// measures beside them.
struct Squares {
  double weight;
  double step;

  TORCHKV_HOST_DEVICE inline Squares& operator+=(const Squares& other) {
    weight += other.weight;
    step += other.step;
    return *this;
  }
};

// The step of a rule for a key; T is the type of its arithmetic.
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
        stream(call.stream),
        id(call.rule.id),
        decoupled(call.rule.decoupled) {}

  RuleNumbers<T> numbers;
  T scale;
  T limit;
  T last_scale;
  uint64_t stream; // as RuleStep
  RuleSpec::Id id;
  bool decoupled;
};

struct ParamsHead {
  uint32_t num_keys;
  uint32_t num_chunks;
  uint32_t chunk; // of a copy in bytes, else in elements
  uint16_t key_bytes;
  uint16_t num_values; // for a copy, outs
  // The first value is a partial sum, in the type of the arithmetic.
  bool first_is_sum;
  double scale; // of a norm's numbers
};

// A kernel's parameters: the smallest size that the keys fit into, because the
// host copies all of it at each launch. More than 4096 bytes require driver
// R530 and cannot be used in a CUDA graph: PyTorch rejects them in a capture,
// and graphs with them have crashed elsewhere.
template <size_t kBytes>
struct Params {
  ParamsHead head;
  alignas(8) char bank[kBytes - (sizeof(ParamsHead) + 7) / 8 * 8];
};
constexpr size_t kSmallParams = 4096;
constexpr size_t kMediumParams = 12288;
// Not the 32764 that CUDA allows: for sm_90, ptxas 13.0 wraps offsets into the
// constant bank around above 32767, and the GPU reads zeros there. From sm_90
// on, the parameters begin at byte 896 of the bank or before.
constexpr size_t kLargeParams = 31744;
static_assert(896 + kLargeParams <= 32768);

static_assert(sizeof(Params<kSmallParams>) == kSmallParams);
static_assert(sizeof(Params<kMediumParams>) == kMediumParams);
static_assert(sizeof(Params<kLargeParams>) == kLargeParams);

// The key of a chunk: the first one that ends after it.
TORCHKV_HOST_DEVICE inline const KeyHead& find_key(
    const ParamsHead& head,
    const char* bank,
    uint32_t chunk,
    uint32_t& first_chunk) {
  const auto key = [&](uint32_t i) -> const KeyHead& {
    const uint32_t offset = i * head.key_bytes;
    return *reinterpret_cast<const KeyHead*>(bank + offset);
  };
  uint32_t low = 0;
  uint32_t high = head.num_keys - 1;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (key(middle).chunk_end <= chunk) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  first_chunk = low == 0 ? 0 : key(low - 1).chunk_end;
  return key(low);
}

TORCHKV_HOST_DEVICE inline void* const* pointers_of(const KeyHead& key) {
  return reinterpret_cast<void* const*>(&key + 1);
}

// One block per chunk.
struct Launch {
  const void*
      params; // a Params<params_bytes> of one of the three sizes; copied
  size_t params_bytes;
  void* stream; // a cudaStream_t on the current device
};

constexpr uint32_t kMaxSent = 8; // values of a launch
constexpr uint32_t kTopDigits = 2048;

// Which elements of a value topk sends, in memory of the device, zeros at
// first: those whose magnitude has more than `least_bits` as an unsigned
// integer and, of those that have as many, those before `ties_end`, as
// cpu::TopElements.
struct TopState {
  uint64_t least_bits;
  int64_t ties_end;
  // For select_top_thread.h:
  int64_t first_tie;
  int64_t num_ties;
  int64_t num_wanted; // of the ties
  int64_t counts[kTopDigits];
};
struct TopValue {
  const void* values;
  const void* residual; // as SentValue's
  TopState* state;
};
// Finds them for each value.
struct SelectTop {
  Dtype value; // of all values; floating
  bool is_aligned; // values and residuals are multiples of 16
  uint32_t num_values; // at least 1
  int64_t num_elements; // at least 1
  int64_t num_sent; // of these, at least 1
  TopValue values[kMaxSent];
};

// What a codec sends of a key's values: its sum, left to right, or the codes of
// each value (code_chunk.h); and the residuals that it leaves. One block for
// each kSendChunk elements. Residuals and the sum are of fp32 or, if the values
// are, of fp64.
constexpr int64_t kSendChunk = 1024;
struct SentValue {
  const void* values;
  // Null for a codec without feedback.
  const void* residual;
  void* kept;
  void* codes; // or null
  const TopState* top; // of topk, else null
  uint64_t stream; // of int4's random numbers
};
struct Send {
  Dtype value; // of all values; floating
  Codec::Id codec;
  bool is_aligned; // all pointers are multiples of 16, as those of codes are
  bool adds; // to the sum of the values before these
  bool packs; // codes, instead of the sum; not of topk
  uint32_t num_values; // at least 1
  double threshold;
  int64_t num_elements; // at least 1
  SentValue values[kMaxSent];
  void* sum; // null if it packs
};

// The sum of values that such codes have, or that are dense, left to right. One
// block for each chunk.
struct ReceivedValue {
  // Codes: from the chunk that has the first element on.
  const void* memory;
  bool is_dense;
};
struct Receive {
  Dtype number; // of the sum and of dense values: fp32 or fp64
  Codec::Id codec; // as Send, whose threshold this is
  // All pointers are multiples of 16, and `first` is one of 4.
  bool is_aligned;
  bool adds; // to the sum of the values before these
  uint32_t num_values; // at least 1
  double threshold;
  int64_t first; // element, in its chunk
  int64_t num_elements; // at least 1
  ReceivedValue values[kMaxSent];
  void* sum;
};

// Row i of `sums` is the sum of the rows at sources[offsets[i]], ...,
// sources[offsets[i + 1] - 1], at least one, in this order.
struct RowSums {
  Dtype value;
  bool is_aligned; // addresses and sizes of rows are multiples of 16 bytes
  int64_t num_rows; // at least 1
  int64_t num_columns; // likewise
  // In memory of the device:
  const void* const* sources;
  const int64_t* offsets;
  void* sums; // contiguous, in the type of the arithmetic
  // If not null: the sum begins with row added_to[i] of `sums`, and replaces
  // it.
  const int64_t* added_to; // distinct
};

// A step of single rows of a value, with such sums as its gradient: row i of
// the sums, which are not stored, steps row rows[i].
struct RowSteps {
  // Without sums; if aligned, so is all memory below.
  RowSums gradients;
  Dtype stored;
  const RuleStep* step; // of an elementwise rule; in memory of the host
  // In memory of the device; rows have num_columns elements, without gaps:
  const int64_t* rows; // distinct
  void* memory; // the stored value
  void* master; // or null
  std::array<void*, kMaxStates> states; // null: not of this rule
  bool follows_writes; // as cpu::StateLine
  int64_t begin; // elements of the stored tensor before `memory`
};

// The functions of libtorchkv_cuda. They return the cudaError_t of their own
// calls and leave older errors of other code alone. They use the current
// device.
struct Table {
  uint32_t abi;
  uint32_t params_bytes; // kLargeParams, or kSmallParams for an old driver

  int (*launch_sum)(Variant variant, Launch launch);
  int (*launch_rates)(Launch launch);
  int (*launch_copy)(Launch launch);
  int (*launch_select_top)(SelectTop call, void* stream);
  int (*launch_send)(Send send, void* stream);
  int (*launch_receive)(Receive call, void* stream);
  int (*launch_row_sums)(RowSums call, void* stream);
  int (*launch_row_steps)(RowSteps call, void* stream);
  // Whether the kernels were compiled for the current device.
  int (*has_code)(bool* result);
  int (*is_capturing)(void* stream, bool* result);
  // Enables access from `device` to the memory of `peer`; succeeds if it is
  // enabled already. cudaErrorPeerAccessUnsupported if the hardware cannot.
  int (*enable_peer)(int device, int peer);
  // Pins memory of the host, in whole pages of which no other is pinned, for
  // all devices, so that copies between it and devices are asynchronous.
  int (*register_host)(int device, void* data, uint64_t size);
  int (*unregister_host)(int device, void* data);
  const char* (*error_string)(int error);
};

} // namespace torchkv::kernels::cuda

// The only export of libtorchkv_cuda.
extern "C" TORCHKV_API const torchkv::kernels::cuda::Table* torchkv_cuda_table();

#pragma once

#include <algorithm>
#include <cstdint>

#include "../codecs.h"
#include "code_chunk.h"
#include "dtypes.h"
#include "params.h"
#include "types.h"

// Which elements of a value topk sends: those of greatest magnitude, found by
// digits of these bits from the highest one on; of equal ones the first, found
// by digits of their indices. Each pass counts how many of the elements that
// have the digits found so far have each next digit, then chooses the digit of
// the last one that is sent. Once all elements with these digits are sent, the
// other passes have nothing to do.
//
// The code of one thread of one block, compiled for GPUs by select_top.cu, and
// for the host by the tests.
namespace torchkv::kernels::cuda {

// Digits of 11 bits: their counts fit into the shared memory of a block.
constexpr uint32_t kTopDigitBits = 11;
static_assert(uint32_t{1} << kTopDigitBits == kTopDigits);
constexpr uint32_t kNoTopDigit = kTopDigits;
constexpr uint32_t kTopDigitsOfThread = kTopDigits / kThreads;
// Blocks that count, of each value: enough for all GPUs, and few to add up.
constexpr int64_t kMaxTopBlocks = 1024;

struct TopPass {
  bool is_first;
  bool is_of_index; // else of the magnitude
  uint32_t shift; // of the digit
  uint32_t known; // bits from this one on have been found
};

// Calls `f` with each pass, for values of type V.
template <typename V, typename F>
void for_each_top_pass(int64_t num_elements, F f) {
  constexpr uint32_t kBits =
      8 * sizeof(arithmetic_t<V>) - 1; // without the sign
  uint32_t num_index_bits = 0;
  while (static_cast<uint64_t>(num_elements) > uint64_t{1} << num_index_bits) {
    ++num_index_bits;
  }
  const auto digits_of = [&](uint32_t known, bool is_of_index) {
    const uint32_t all = known;
    while (known > 0) {
      const uint32_t shift = known - std::min(known, kTopDigitBits);
      f(TopPass{!is_of_index && known == all, is_of_index, shift, known});
      known = shift;
    }
  };
  digits_of(kBits, false);
  digits_of(num_index_bits, true);
}

inline int64_t num_top_chunks(const SelectTop& call) {
  return (call.num_elements + kSendChunk - 1) / kSendChunk;
}

// Whether the passes before have found all of value `k`.
TORCHKV_HOST_DEVICE inline bool is_found(
    const SelectTop& call,
    const TopPass& pass,
    uint32_t k) {
  const TopState& state = *call.values[k].state;
  return !pass.is_first && state.num_wanted == state.num_ties;
}

// The digits of a thread's elements of a chunk of value `k`; kNoTopDigit for
// those that are not counted.
template <typename V>
TORCHKV_HOST_DEVICE inline void find_top_digits(
    const SelectTop& call,
    const TopPass& pass,
    uint32_t k,
    int64_t chunk,
    uint32_t thread,
    uint32_t (&digits)[kSendPack]) {
  const int64_t first = chunk * kSendChunk + int64_t{thread} * kSendPack;
  const TopValue& value = call.values[k];
  const TopState& state = *value.state;
  const SendRange range(first, call.num_elements, call.is_aligned);
  Pack<arithmetic_t<V>, kSendPack> numbers;
  range.load_sum<false, V>(value.values, value.residual, numbers);
  TORCHKV_UNROLL
  for (int i = 0; i < kSendPack; ++i) {
    const uint64_t bits = codecs::magnitude_bits(numbers.at[i]);
    const int64_t index = first + i;
    bool is_counted;
    uint32_t digit;
    if (pass.is_of_index) {
      is_counted = bits == state.least_bits && index >= state.first_tie &&
          index < state.ties_end;
      const auto of_index =
          static_cast<uint32_t>(static_cast<uint64_t>(index) >> pass.shift);
      digit = kTopDigits - 1 - of_index % kTopDigits; // the first ones
    } else {
      is_counted = index < call.num_elements &&
          bits >> pass.known == state.least_bits >> pass.known;
      digit = static_cast<uint32_t>(bits >> pass.shift) % kTopDigits;
    }
    digits[i] = is_counted ? digit : kNoTopDigit;
  }
}

// One of the threads of the block that chooses the digit of value `k`. All
// threads' sums() are shared; then they choose(), and clear the counts for the
// next pass.
class TopChoice {
 public:
  TORCHKV_HOST_DEVICE TopChoice(
      const SelectTop& call,
      const TopPass& pass,
      uint32_t k,
      uint32_t thread)
      : state_(*call.values[k].state),
        num_wanted_(pass.is_first ? call.num_sent : state_.num_wanted),
        thread_(thread) {
    TORCHKV_UNROLL
    for (uint32_t i = 0; i < kTopDigitsOfThread; ++i) {
      counts_[i] = state_.counts[thread * kTopDigitsOfThread + i];
    }
  }

  // How many elements have one of the thread's digits.
  TORCHKV_HOST_DEVICE inline int64_t sum() const {
    int64_t result = 0;
    TORCHKV_UNROLL
    for (const int64_t count : counts_) {
      result += count;
    }
    return result;
  }

  // `sums`: of all threads.
  TORCHKV_HOST_DEVICE inline void choose(
      const SelectTop& call,
      const TopPass& pass,
      const int64_t* sums) {
    int64_t before = 0; // elements with a greater digit
    TORCHKV_NO_UNROLL
    for (uint32_t other = kThreads - 1; other > thread_; --other) {
      before += sums[other];
    }
    TORCHKV_UNROLL
    for (uint32_t i = kTopDigitsOfThread; i-- > 0;) {
      const uint32_t digit = thread_ * kTopDigitsOfThread + i;
      if (before < num_wanted_ && num_wanted_ <= before + counts_[i]) {
        keep(call, pass, digit, num_wanted_ - before, counts_[i]);
      }
      before += counts_[i];
      state_.counts[digit] = 0;
    }
  }

 private:
  TORCHKV_HOST_DEVICE inline void keep(
      const SelectTop& call,
      const TopPass& pass,
      uint32_t digit,
      int64_t num_wanted,
      int64_t num_ties) {
    state_.num_wanted = num_wanted;
    state_.num_ties = num_ties;
    state_.ties_end = call.num_elements;
    if (pass.is_of_index) {
      const uint64_t of_index = kTopDigits - 1 - digit;
      state_.first_tie |= static_cast<int64_t>(of_index << pass.shift);
      const int64_t end =
          state_.first_tie + static_cast<int64_t>(uint64_t{1} << pass.shift);
      state_.ties_end = end < call.num_elements ? end : call.num_elements;
    } else {
      state_.least_bits |= uint64_t{digit} << pass.shift;
    }
  }

  TopState& state_;
  int64_t num_wanted_;
  uint32_t thread_;
  int64_t counts_[kTopDigitsOfThread];
};

// Calls `f` with a value of the values' type, and returns whether there are
// kernels for it.
template <typename F>
bool dispatch_select_top(const SelectTop& call, F f) {
  bool is_known = false;
  dispatch_dtype(call.value, [&](auto value) {
    if constexpr (is_floating(dtype_of<decltype(value)>())) {
      is_known = true;
      f(value);
    }
  });
  return is_known;
}

} // namespace torchkv::kernels::cuda

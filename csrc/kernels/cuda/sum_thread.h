#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "rule_thread.h"
#include "types.h"
#include "weight_pack.h"

// Sums, rules and norms: the code of one thread of one block, compiled
// for GPUs by the .cu files, and for the host by the tests, which compare its
// results with those of the CPU kernels.
namespace torchkv::kernels::cuda {

// The parameters of a kernel: the types of the values and the stored value, the
// rule, and the number of values (0 = any).
template <typename V, typename S, Rule kRuleOfAll, int kNumValues>
struct Sum {
  using value_t = V;
  using stored_t = S;
  using total_t = arithmetic_t<V>;
  using weight_t = arithmetic_t<S>;

  static constexpr Rule kRule = kRuleOfAll;
  static constexpr bool kIsNorm = kRule == Rule::kNorm;
  static constexpr bool kMeasures = kRule == Rule::kMeasure;
  static constexpr bool kHasSquares = kIsNorm || kMeasures;
  using squares_t = std::conditional_t<kMeasures, Squares, double>;
  static constexpr bool kHasWeight = has_weight(kRule);
  static constexpr int kValues = kNumValues;
  // If the number of values is not fixed, they are loaded and added in groups.
  static constexpr int kGroup = kValues == 0 ? 4 : kValues;
  static constexpr int kStates = static_cast<int>(num_states(kRule));
  static constexpr int kPointers = static_cast<int>(num_pointers(kRule));
  // A word of values, but at most a word of each state if there are several,
  // and at most 8 sums, to limit registers.
  static constexpr int kPackSize = kStates > 1 ? kWord / sizeof(weight_t)
      : sizeof(V) == 1                         ? 8
                                               : kWord / sizeof(V);
  // Packs of a thread in flight. With 1024 threads or more, 48 to 64 bytes each
  // saturate the memory of a multiprocessor. Optional states do not count.
  static constexpr int kNeededStates = kStates > 1 ? 2 : 0;
  static constexpr int kPackBytes = kPackSize *
      static_cast<int>(kGroup * sizeof(V) +
                       (kHasWeight ? sizeof(weight_t) * (1 + kNeededStates)
                                   : 0));
  static constexpr int kUnroll =
      kValues == 0 || kPackBytes >= 48 ? 1 : 64 / kPackBytes;
  // For packs of one element: up to 16 loads, beyond which registers spill.
  static constexpr int kLoads = kGroup + (kHasWeight ? 1 + kStates : 0);
  static constexpr int kUnrollOfOne = kValues == 0 || kLoads > 8 ? 1
      : kLoads > 4                                               ? 2
      : kLoads > 2                                               ? 4
                                                                 : 8;
};

// One pack of a key: load() issues the loads, so that several packs are in
// flight together; finish() adds, applies the rule and stores.
template <typename P, int kSize>
class PackOfSum {
 public:
  using value_t = typename P::value_t;
  using stored_t = typename P::stored_t;
  using total_t = typename P::total_t;
  using weight_t = typename P::weight_t;

  TORCHKV_HOST_DEVICE inline void load(const KeyHead& key, int64_t element) {
    if constexpr (P::kValues != 0) {
      load_group(key, element, 0, P::kValues);
    }
    if constexpr (P::kHasWeight) {
      weight_.load(key.memory, pointers_of(key), element);
    }
  }

  // Returns the sum of squares if there is one, else 0.
  TORCHKV_HOST_DEVICE inline typename P::squares_t finish(
      const ParamsHead& head,
      const KeyHead& key,
      const Step<weight_t>* step,
      int64_t element) {
    Pack<total_t, kSize> total;
    if constexpr (P::kValues == 0) {
      sum_groups(head, key, element, total);
    } else {
      TORCHKV_UNROLL
      for (int i = 0; i < kSize; ++i) {
        total.at[i] = widen(values_[0].at[i]);
      }
      add_group(1, P::kValues, total);
    }
    if constexpr (P::kIsNorm) {
      double squares = 0;
      TORCHKV_UNROLL
      for (int i = 0; i < kSize; ++i) {
        const double g =
            static_cast<double>(clipped(*step, total.at[i])) * head.scale;
        squares += g * g;
      }
      return squares;
    } else if constexpr (P::kMeasures) {
      return measure(key, *step, element, total);
    } else {
      if constexpr (P::kHasWeight) {
        // Of a rule with norms, the master has followed before.
        if (P::kRule != Rule::kScaled && key.follows_writes != 0) {
          weight_.follow_writes(key.memory, element);
        }
        update_weight(key, *step, element, total);
        weight_.store_master(pointers_of(key), element, total);
      }
      store_rounded<kStreams>(
          total, static_cast<stored_t*>(key.memory) + element);
      return 0;
    }
  }

 private:
  // On an H200, streaming sums of two take 12 % longer than torch.add, which
  // does not stream. A norm's values are read once more, by the step.
  static constexpr bool kStreams = P::kHasWeight && !P::kMeasures;

  // gradient = rule(weight, gradient)
  TORCHKV_HOST_DEVICE inline void update_weight(
      const KeyHead& key,
      const Step<weight_t>& step,
      int64_t element,
      Pack<total_t, kSize>& gradient) {
    void* const* pointers = pointers_of(key);
    if constexpr (P::kRule == Rule::kScaled) {
      const auto rate =
          static_cast<weight_t>(*static_cast<const double*>(numbers_of(key)));
      weight_.step(
          pointers,
          gradient,
          [&](weight_t w, weight_t g, const bool* has, weight_t* s, int) {
            return scaled_update(step, w, g, has, s, rate);
          });
      if (is_lamb(step.id)) {
        return; // the state is new already
      }
    } else {
      weight_.step(
          pointers,
          gradient,
          [&](weight_t w, weight_t g, const bool* has, weight_t* s, int i) {
            return update(step, P::kRule, w, g, has, s, element + i);
          });
    }
    weight_.store_states(pointers, element);
  }

  // The first pass of a rule that has_norms().
  TORCHKV_HOST_DEVICE inline Squares measure(
      const KeyHead& key,
      const Step<weight_t>& step,
      int64_t element,
      Pack<total_t, kSize>& gradient) {
    Squares squares{};
    weight_.step(
        pointers_of(key),
        gradient,
        [&](weight_t w, weight_t g, const bool*, weight_t* s, int) {
          const double of_step = is_lamb(step.id)
              ? lamb_first_pass(step, w, g, s)
              : clipped(step, g);
          const double weight = w;
          squares += {weight * weight, of_step * of_step};
          return g;
        });
    if (is_lamb(step.id)) {
      weight_.store_states(pointers_of(key), element);
    }
    return squares;
  }

  TORCHKV_HOST_DEVICE static inline void* numbers_of(const KeyHead& key) {
    return pointers_of(key)[P::kPointers - 1];
  }
  TORCHKV_HOST_DEVICE static inline const value_t* value_of(
      const KeyHead& key,
      int k) {
    return static_cast<const value_t*>(pointers_of(key)[P::kPointers + k]);
  }
  // `count` values from index `first`.
  TORCHKV_HOST_DEVICE inline void load_group(
      const KeyHead& key,
      int64_t element,
      int first,
      int count) {
    TORCHKV_UNROLL
    for (int k = 0; k < P::kGroup; ++k) {
      if (k < count) {
        values_[k] = cuda::load<kStreams, value_t, kSize>(
            value_of(key, first + k) + element);
      }
    }
  }

  TORCHKV_HOST_DEVICE inline void add_group(
      int first,
      int count,
      Pack<total_t, kSize>& total) {
    TORCHKV_UNROLL
    for (int k = 0; k < P::kGroup; ++k) {
      if (k >= first && k < count) {
        TORCHKV_UNROLL
        for (int i = 0; i < kSize; ++i) {
          total.at[i] = add(total.at[i], widen(values_[k].at[i]));
        }
      }
    }
  }

  TORCHKV_HOST_DEVICE inline void sum_groups(
      const ParamsHead& head,
      const KeyHead& key,
      int64_t element,
      Pack<total_t, kSize>& total) {
    int first = 0;
    if (head.first_is_sum) {
      total = cuda::load<false, total_t, kSize>(
          static_cast<const total_t*>(pointers_of(key)[P::kPointers]) +
          element);
      first = 1;
    } else {
      TORCHKV_UNROLL
      for (int i = 0; i < kSize; ++i) {
        total.at[i] = nothing<total_t>();
      }
    }
    TORCHKV_NO_UNROLL
    for (; first < head.num_values; first += P::kGroup) {
      load_group(key, element, first, head.num_values - first);
      add_group(0, head.num_values - first, total);
    }
  }

  Pack<value_t, kSize> values_[P::kGroup];
  WeightPack<stored_t, P::kStates, kSize> weight_;
};

// This thread's packs of `kSize` elements in elements [begin, end) of a key;
// returns the sum of what finish() returns.
template <typename P, int kSize>
TORCHKV_HOST_DEVICE inline typename P::squares_t sum_packs(
    const ParamsHead& head,
    const KeyHead& key,
    const Step<typename P::weight_t>* step,
    int64_t begin,
    int64_t end,
    uint32_t thread) {
  constexpr int64_t kStride = int64_t{kThreads} * kSize;
  constexpr int kUnroll = kSize == 1 ? P::kUnrollOfOne : P::kUnroll;
  typename P::squares_t squares{};
  TORCHKV_NO_UNROLL
  for (int64_t first = begin + int64_t{thread} * kSize; first < end;
       first += kStride * kUnroll) {
    PackOfSum<P, kSize> packs[kUnroll];
    TORCHKV_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kStride < end) {
        packs[u].load(key, first + u * kStride);
      }
    }
    TORCHKV_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kStride < end) {
        squares += packs[u].finish(head, key, step, first + u * kStride);
      }
    }
  }
  return squares;
}

// The work of one thread on a chunk; returns its share of the squares.
template <typename P>
TORCHKV_HOST_DEVICE inline typename P::squares_t sum_thread(
    const ParamsHead& head,
    const char* bank,
    size_t bank_bytes,
    uint32_t chunk,
    uint32_t thread) {
  using step_t = Step<typename P::weight_t>;
  uint32_t first_chunk = 0;
  const KeyHead& key = find_key(head, bank, chunk, first_chunk);
  const auto* steps = reinterpret_cast<const step_t*>(bank + bank_bytes);
  const step_t* step = steps - 1 - key.step;
  const int64_t begin = int64_t{chunk - first_chunk} * head.chunk;
  const int64_t end =
      key.size - begin < head.chunk ? key.size : begin + head.chunk;
  // The remainder after the last whole pack, and keys that are not aligned.
  int64_t rest = begin;
  typename P::squares_t squares{};
  if (key.alignment == kWord) {
    rest = end - (end - begin) % P::kPackSize;
    squares = sum_packs<P, P::kPackSize>(head, key, step, begin, rest, thread);
  }
  squares += sum_packs<P, 1>(head, key, step, rest, end, thread);
  return squares;
}

// Adds all threads' shares of squares into shares[0], in a fixed order.
// `synchronize` waits for all threads of the block.
template <typename T, typename Synchronize>
TORCHKV_HOST_DEVICE inline void add_shares(
    T* shares,
    uint32_t thread,
    Synchronize synchronize) {
  for (uint32_t half = kThreads / 2; half > 0; half /= 2) {
    synchronize();
    if (thread < half) {
      shares[thread] += shares[thread + half];
    }
  }
}

// The address of a chunk's squares.
template <typename P>
TORCHKV_HOST_DEVICE inline typename P::squares_t* squares_of(
    const ParamsHead& head,
    const char* bank,
    uint32_t chunk) {
  uint32_t first_chunk = 0;
  const KeyHead& key = find_key(head, bank, chunk, first_chunk);
  void* const all =
      P::kIsNorm ? key.memory : pointers_of(key)[P::kPointers - 1];
  return static_cast<typename P::squares_t*>(all) + (chunk - first_chunk);
}

} // namespace torchkv::kernels::cuda

#pragma once

#include <cstdint>
#include <type_traits>

#include "dtypes.h"
#include "row_sum_thread.h"
#include "rule_thread.h"
#include "weight_pack.h"

// Steps of rows: the code of one thread of one block, compiled for GPUs by
// row_steps.cu, and for the host by the tests.
namespace torchkv::kernels::cuda {

// The parameters of a kernel whose arithmetic is of type T.
template <typename T>
struct RowStepParams {
  explicit RowStepParams(const RowSteps& call)
      : gradients(call.gradients),
        rows(call.rows),
        memory(call.memory),
        pointers{call.master},
        step(*call.step),
        rule(rule_of(call.step->rule.id)),
        follows_writes(call.follows_writes) {
    step.stream += static_cast<uint64_t>(call.begin);
    for (size_t i = 0; i < kMaxStates; ++i) {
      pointers[1 + i] = call.states[i];
    }
  }

  RowSums gradients;
  const int64_t* rows;
  void* memory;
  void* pointers[1 + kMaxStates]; // the master, the states
  Step<T> step;
  Rule rule;
  bool follows_writes;
};

// Elements of a thread: a word of weights, or one where rows are not aligned.
template <typename S>
constexpr int kRowStepPack = kWord / static_cast<int>(sizeof(arithmetic_t<S>));

template <typename V, typename S, int kSize>
TORCHKV_HOST_DEVICE inline void row_step_thread(
    const RowStepParams<arithmetic_t<S>>& call,
    uint32_t block,
    uint32_t thread) {
  static_assert(std::is_same_v<arithmetic_t<V>, arithmetic_t<S>>);
  const int64_t number = int64_t{block} * kThreads + thread;
  if (number >= num_row_packs<kSize>(call.gradients)) {
    return;
  }
  const auto pack = RowPack::of<kSize>(call.gradients, number);
  const int64_t element =
      call.rows[pack.row] * call.gradients.num_columns + pack.column;
  WeightPack<S, static_cast<int>(kMaxStates), kSize> weight;
  weight.load(call.memory, call.pointers, element);
  Pack<arithmetic_t<V>, kSize> total;
  clear(total);
  add_rows<V, kSize>(call.gradients, pack, total);
  if (call.follows_writes) {
    weight.follow_writes(call.memory, element);
  }
  using weight_t = arithmetic_t<S>;
  weight.step(
      call.pointers,
      total,
      [&](weight_t w, weight_t g, const bool* has, weight_t* s, int i) {
        return update(call.step, call.rule, w, g, has, s, element + i);
      });
  weight.store_states(call.pointers, element);
  weight.store_master(call.pointers, element, total);
  store_rounded<true>(total, static_cast<S*>(call.memory) + element);
}

// Calls `f` with numbers of the types of the values and of the weight, and
// returns whether there is a kernel for them.
template <typename F>
bool dispatch_row_steps(const RowSteps& call, F f) {
  bool is_known = false;
  dispatch_dtype(call.gradients.value, [&](auto value) {
    dispatch_dtype(call.stored, [&](auto stored) {
      using V = decltype(value);
      using S = decltype(stored);
      if constexpr (steps_rows(dtype_of<V>(), dtype_of<S>())) {
        f(value, stored);
        is_known = true;
      }
    });
  });
  return is_known;
}

} // namespace torchkv::kernels::cuda

#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "types.h"

namespace torchkv::kernels::cuda {

// Consecutive weights of type S in a thread's registers, with their state.
// `memory` is the stored value and `pointers` the master and `kStates` states,
// each null if there is none; `element` counts from these. load() issues the
// loads, which are in flight until step() needs them.
template <typename S, int kStates, int kSize>
class WeightPack {
 public:
  using weight_t = arithmetic_t<S>;

  TORCHKV_HOST_DEVICE inline void load(
      const void* memory,
      void* const* pointers,
      int64_t element) {
    const auto* stored = static_cast<const S*>(memory) + element;
    if constexpr (!kHasMaster) {
      weight_ = cuda::load<false, weight_t, kSize>(stored);
    } else if (pointers[0] != nullptr) {
      weight_ = cuda::load<false, weight_t, kSize>(at(pointers, 0) + element);
    } else {
      const auto rounded = cuda::load<false, S, kSize>(stored);
      TORCHKV_UNROLL
      for (int i = 0; i < kSize; ++i) {
        weight_.at[i] = widen(rounded.at[i]);
      }
    }
    TORCHKV_UNROLL
    for (int s = 0; s < kStates; ++s) {
      if (pointers[1 + s] != nullptr) {
        states_[s] =
            cuda::load<false, weight_t, kSize>(at(pointers, 1 + s) + element);
      }
    }
  }

  // As cpu::StateLine. Loads what may have been written here, because load()
  // has no registers left.
  TORCHKV_HOST_DEVICE inline void follow_writes(
      const void* memory,
      int64_t element) {
    if constexpr (kHasMaster) {
      const auto written =
          cuda::load<false, S, kSize>(static_cast<const S*>(memory) + element);
      TORCHKV_UNROLL
      for (int i = 0; i < kSize; ++i) {
        const weight_t number = widen(written.at[i]);
        const weight_t rounded = widen(narrow<S>(weight_.at[i]));
        weight_.at[i] = rounded == number ? weight_.at[i] : number;
      }
    }
  }

  // gradient = update(weight, gradient, whether there are the states, states,
  // place in the pack)
  template <typename F>
  TORCHKV_HOST_DEVICE inline void step(
      void* const* pointers,
      Pack<weight_t, kSize>& gradient,
      F update) {
    bool has[kStates];
    TORCHKV_UNROLL
    for (int s = 0; s < kStates; ++s) {
      has[s] = pointers[1 + s] != nullptr;
    }
    TORCHKV_UNROLL
    for (int i = 0; i < kSize; ++i) {
      weight_t states[kStates];
      TORCHKV_UNROLL
      for (int s = 0; s < kStates; ++s) {
        states[s] = states_[s].at[i];
      }
      gradient.at[i] = update(weight_.at[i], gradient.at[i], has, states, i);
      TORCHKV_UNROLL
      for (int s = 0; s < kStates; ++s) {
        states_[s].at[i] = states[s];
      }
    }
  }

  TORCHKV_HOST_DEVICE inline void store_states(
      void* const* pointers,
      int64_t element) const {
    TORCHKV_UNROLL
    for (int s = 0; s < kStates; ++s) {
      if (pointers[1 + s] != nullptr) {
        store<true>(states_[s], at(pointers, 1 + s) + element);
      }
    }
  }

  // This new weight as the master, if there is one.
  TORCHKV_HOST_DEVICE inline void store_master(
      void* const* pointers,
      int64_t element,
      const Pack<weight_t, kSize>& weight) const {
    if (kHasMaster && pointers[0] != nullptr) {
      store<true>(weight, at(pointers, 0) + element);
    }
  }

 private:
  static constexpr bool kHasMaster = !std::is_same_v<S, weight_t>;

  TORCHKV_HOST_DEVICE static inline weight_t* at(
      void* const* pointers,
      int place) {
    return static_cast<weight_t*>(pointers[place]);
  }

  Pack<weight_t, kSize> weight_;
  Pack<weight_t, kSize> states_[kStates > 0 ? kStates : 1];
};

// Rounds numbers to type S.
template <bool kStreams, typename S, int kSize>
TORCHKV_HOST_DEVICE inline void store_rounded(
    const Pack<arithmetic_t<S>, kSize>& numbers,
    S* destination) {
  Pack<S, kSize> result;
  TORCHKV_UNROLL
  for (int i = 0; i < kSize; ++i) {
    result.at[i] = narrow<S>(numbers.at[i]);
  }
  store<kStreams>(result, destination);
}

} // namespace torchkv::kernels::cuda

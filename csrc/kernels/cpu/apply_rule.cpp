#include "apply_rule.h"

#include <limits>
#include <type_traits>

#include "../../core/errors.h"
#include "../../core/mixed_bits.h"
#include "../../core/normal.h"
#include "../mxnet_rules.h"
#include "clones.h"
#include "squares.h"

namespace torchkv::kernels::cpu {
namespace {

// w[i] = formula(w[i], g[i], states[i]...), inlined into each clone. The
// formula is copied: to vectorize, the compiler must know that writing a weight
// does not change its numbers.
template <typename T, typename Formula, typename... State>
TORCHKV_CLONES void update_each(
    const Formula& given,
    const T* __restrict g,
    T* __restrict w,
    int64_t num_numbers,
    State* __restrict... states) {
  const Formula formula = given;
  for (int64_t i = 0; i < num_numbers; ++i) {
    w[i] = formula(w[i], g[i], states[i]...);
  }
}

template <typename T>
TORCHKV_CLONES void sgld_each(
    const RuleNumbers<T>& numbers,
    uint64_t stream, // of the first number
    const T* __restrict g,
    T* __restrict w,
    int64_t num_numbers) {
  const RuleNumbers<T> n = numbers;
  for (int64_t i = 0; i < num_numbers; ++i) {
    const uint64_t bits = mixed_bits(stream + static_cast<uint64_t>(i));
    w[i] = mxnet_sgld(w[i], g[i], static_cast<T>(normal_number(bits)), n);
  }
}

template <typename T>
TORCHKV_CLONES void scale_and_clip(
    const T* g,
    T scale,
    T clip_value,
    T last_scale,
    int64_t num_numbers,
    T* result) {
  const T limit =
      clip_value > 0 ? clip_value : std::numeric_limits<T>::infinity();
  for (int64_t i = 0; i < num_numbers; ++i) {
    T value = g[i] * scale;
    value = value > limit ? limit : value; // propagates NaN
    value = value < -limit ? -limit : value;
    result[i] = value * last_scale;
  }
}

// The gradient that the formulas have: `g` itself, or written to `scratch`.
template <typename T>
const T* make_gradient(
    const RuleStep& step,
    const T* g,
    int64_t num_numbers,
    T* scratch) {
  const T last_scale =
      static_cast<T>(step.rule.maximize ? -step.last_scale : step.last_scale);
  if (step.scale == 1 && step.clip_value == 0 && last_scale == 1) {
    return g;
  }
  scale_and_clip(
      g,
      static_cast<T>(step.scale),
      static_cast<T>(step.clip_value),
      last_scale,
      num_numbers,
      scratch);
  return scratch;
}

template <typename T>
TORCHKV_CLONES double scaled_squares(
    const T* numbers,
    int64_t count,
    double scale) {
  return sum_of_squares(numbers, count, scale);
}

// Calls `update` with Adam's formula and the states that it has.
template <bool kDecoupled, typename T, typename Update>
void adam_each(
    const RuleNumbers<T>& n,
    const std::array<T*, kMaxStates>& s,
    Update update) {
  if (s[2] == nullptr) {
    update(
        [n](T w, T g, T& m, T& v) {
          return adam<kDecoupled, false>(w, g, m, v, v, n);
        },
        s[0],
        s[1]);
  } else {
    update(
        [n](T w, T g, T& m, T& v, T& largest) {
          return adam<kDecoupled, true>(w, g, m, v, largest, n);
        },
        s[0],
        s[1],
        s[2]);
  }
}

template <typename T, typename Update>
void rmsprop_each(
    const RuleNumbers<T>& n,
    const std::array<T*, kMaxStates>& s,
    Update update) {
  if (s[1] == nullptr && s[2] == nullptr) {
    update(
        [n](T w, T g, T& sq) {
          return rmsprop<false, false>(w, g, sq, sq, sq, n);
        },
        s[0]);
  } else if (s[1] == nullptr) {
    update(
        [n](T w, T g, T& sq, T& buffer) {
          return rmsprop<false, true>(w, g, sq, sq, buffer, n);
        },
        s[0],
        s[2]);
  } else if (s[2] == nullptr) {
    update(
        [n](T w, T g, T& sq, T& mean) {
          return rmsprop<true, false>(w, g, sq, mean, sq, n);
        },
        s[0],
        s[1]);
  } else {
    update(
        [n](T w, T g, T& sq, T& mean, T& buffer) {
          return rmsprop<true, true>(w, g, sq, mean, buffer, n);
        },
        s[0],
        s[1],
        s[2]);
  }
}

template <typename T, typename Update>
void mxnet_each(
    const RuleSpec& rule,
    const RuleNumbers<T>& n,
    const std::array<T*, kMaxStates>& s,
    Update update) {
  const bool has_momentum = s[0] != nullptr;
  switch (rule.id) {
    case RuleSpec::Id::kMxnetNag:
      if (has_momentum) {
        update(
            [n](T w, T g, T& m) { return mxnet_nag_momentum(w, g, m, n); },
            s[0]);
        break;
      }
      [[fallthrough]];
    case RuleSpec::Id::kMxnetSgd:
      if (has_momentum) {
        update(
            [n](T w, T g, T& m) { return mxnet_sgd_momentum(w, g, m, n); },
            s[0]);
      } else {
        update([n](T w, T g) { return mxnet_sgd(w, g, n); });
      }
      break;
    case RuleSpec::Id::kMxnetSignum:
      if (has_momentum) {
        update([n](T w, T g, T& m) { return mxnet_signum(w, g, m, n); }, s[0]);
      } else {
        update([n](T w, T g) { return mxnet_signsgd(w, g, n); });
      }
      break;
    case RuleSpec::Id::kMxnetAdam:
      update(
          [n](T w, T g, T& m, T& v) { return mxnet_adam(w, g, m, v, n); },
          s[0],
          s[1]);
      break;
    case RuleSpec::Id::kMxnetAdamax:
      update(
          [n](T w, T g, T& m, T& u) { return mxnet_adamax(w, g, m, u, n); },
          s[0],
          s[1]);
      break;
    case RuleSpec::Id::kMxnetNadam:
      update(
          [n](T w, T g, T& m, T& v) { return mxnet_nadam(w, g, m, v, n); },
          s[0],
          s[1]);
      break;
    case RuleSpec::Id::kMxnetAdagrad:
      update(
          [n](T w, T g, T& sum) { return mxnet_adagrad(w, g, sum, n); }, s[0]);
      break;
    case RuleSpec::Id::kMxnetAdadelta:
      update(
          [n](T w, T g, T& sq, T& d) { return mxnet_adadelta(w, g, sq, d, n); },
          s[0],
          s[1]);
      break;
    case RuleSpec::Id::kMxnetRmsprop:
      if (rule.centered) {
        update(
            [n](T w, T g, T& sq, T& mean, T& d) {
              return mxnet_rmsprop<true>(w, g, sq, mean, d, n);
            },
            s[0],
            s[1],
            s[2]);
      } else {
        update(
            [n](T w, T g, T& sq) {
              return mxnet_rmsprop<false>(w, g, sq, sq, sq, n);
            },
            s[0]);
      }
      break;
    case RuleSpec::Id::kMxnetFtrl:
      update(
          [n](T w, T g, T& z, T& sq) { return mxnet_ftrl(w, g, z, sq, n); },
          s[0],
          s[1]);
      break;
    case RuleSpec::Id::kMxnetFtml:
      update(
          [n](T w, T g, T& d, T& v, T& z) {
            return mxnet_ftml(w, g, d, v, z, n);
          },
          s[0],
          s[1],
          s[2]);
      break;
    case RuleSpec::Id::kMxnetDcasgd:
      if (s[1] != nullptr) {
        update(
            [n](T w, T g, T& previous, T& m) {
              return mxnet_dcasgd<true>(w, g, previous, m, n);
            },
            s[0],
            s[1]);
      } else {
        update(
            [n](T w, T g, T& previous) {
              return mxnet_dcasgd<false>(w, g, previous, previous, n);
            },
            s[0]);
      }
      break;
    case RuleSpec::Id::kMxnetLars:
      update([n](T w, T g, T& m) { return mxnet_lars(w, g, m, n); }, s[0]);
      break;
    case RuleSpec::Id::kMxnetLamb:
      // As LAMB below.
      update(
          [n](T w, T g, T& m, T& v) {
            mxnet_lamb_state(g, m, v, n);
            return w;
          },
          s[0],
          s[1]);
      break;
    case RuleSpec::Id::kMxnetGroupAdagrad:
      // The second of two passes; the first has updated the history.
      update(
          [n](T w, T g, T history) {
            return mxnet_group_adagrad(w, g, history, n);
          },
          s[0]);
      break;
    case RuleSpec::Id::kMxnetTest:
      update([](T w, T g) { return w + g; });
      break;
    default:
      TORCHKV_INTERNAL_ASSERT(false);
  }
}

} // namespace

template <typename T>
void apply_rule(
    const RuleStep& step,
    const RuleNumbers<T>& n,
    const RuleBlock<T>& block) {
  const RuleSpec& rule = step.rule;
  const T* const g =
      make_gradient(step, block.gradients, block.num_numbers, block.scratch);
  const auto update = [&](auto formula, auto*... used) {
    update_each<T>(formula, g, block.weights, block.num_numbers, used...);
  };
  const auto& states = block.states;
  T* const s0 = states[0];
  switch (rule.id) {
    case RuleSpec::Id::kSgd:
      if (s0 == nullptr) {
        update([n](T w, T g) { return sgd(w, g, n); });
      } else {
        update(
            [n](T w, T g, T& buffer) { return sgd_momentum(w, g, buffer, n); },
            s0);
      }
      break;
    case RuleSpec::Id::kAdam:
      rule.decoupled ? adam_each<true>(n, states, update)
                     : adam_each<false>(n, states, update);
      break;
    case RuleSpec::Id::kAdagrad:
      update([n](T w, T g, T& sum) { return adagrad(w, g, sum, n); }, s0);
      break;
    case RuleSpec::Id::kRmsprop:
      rmsprop_each(n, states, update);
      break;
    case RuleSpec::Id::kLion:
      update([n](T w, T g, T& m) { return lion(w, g, m, n); }, s0);
      break;
    case RuleSpec::Id::kLamb:
      // The first of two passes; the second updates the weights.
      update(
          [n](T w, T g, T& m, T& v) {
            lamb_state(g, m, v, n);
            return w;
          },
          s0,
          states[1]);
      break;
    case RuleSpec::Id::kAssign:
      TORCHKV_INTERNAL_ASSERT(false);
      break;
    case RuleSpec::Id::kMxnetSgld:
      sgld_each(
          n,
          step.stream + static_cast<uint64_t>(block.begin),
          g,
          block.weights,
          block.num_numbers);
      break;
    default:
      mxnet_each(rule, n, states, update);
  }
}

template <typename T>
double squared_norm(
    const RuleStep& step,
    T* g,
    int64_t num_numbers,
    double scale) {
  scale_and_clip<T>(
      g,
      static_cast<T>(step.scale),
      static_cast<T>(step.clip_value),
      T(1),
      num_numbers,
      g);
  return scaled_squares(g, num_numbers, scale);
}

template <typename T>
double squared_norm(const T* numbers, int64_t count, double scale) {
  return scaled_squares(numbers, count, scale);
}

template <typename T>
void make_limited_gradient(const RuleStep& step, T* g, int64_t num_numbers) {
  make_gradient<T>(step, g, num_numbers, g);
  if (step.rule.clip_gradient > 0) {
    const auto limit = static_cast<T>(step.rule.clip_gradient);
    scale_and_clip<T>(g, T(1), limit, T(1), num_numbers, g);
  }
}

template void apply_rule(
    const RuleStep& step,
    const RuleNumbers<float>& numbers,
    const RuleBlock<float>& block);
template void apply_rule(
    const RuleStep& step,
    const RuleNumbers<double>& numbers,
    const RuleBlock<double>& block);
template double squared_norm(const RuleStep&, float*, int64_t, double);
template double squared_norm(const RuleStep&, double*, int64_t, double);
template double squared_norm(const float*, int64_t, double);
template double squared_norm(const double*, int64_t, double);
template void make_limited_gradient(const RuleStep&, float*, int64_t);
template void make_limited_gradient(const RuleStep&, double*, int64_t);

} // namespace torchkv::kernels::cpu

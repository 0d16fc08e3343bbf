#pragma once

#include <cmath>

#include "../../core/step_rate.h"
#include "params.h"

// The rate of a step from the norms of a value, by the threads of a block.
namespace torchkv::kernels::cuda {

// The Step of launch_rates.
struct RateStep {
  explicit RateStep(const RuleStep& call)
      : rule(call.rule), scale(call.scale), last_scale(call.last_scale) {}

  RuleSpec rule;
  double scale;
  double last_scale;
};

// What takes the place of a rule's learning rate, or of the ratio by which it
// scales the gradient.
TORCHKV_HOST_DEVICE inline double rate_of(
    const RateStep& step,
    const Squares& squares) {
  const RuleSpec& rule = step.rule;
  // LAMB's directions contain the last scale, gradients do not.
  const double last_scale = is_lamb(rule.id) ? 1 : std::abs(step.last_scale);
  const double of_step = std::sqrt(squares.step) * last_scale;
  const double ratio =
      norm_ratio(rule, step.scale, std::sqrt(squares.weight), of_step);
  return scales_gradient(rule) ? ratio : rule.lr * ratio;
}

// A block's key.
TORCHKV_HOST_DEVICE inline const KeyHead& key_of_rate(
    const ParamsHead& head,
    const char* bank,
    uint32_t block) {
  const uint32_t offset = block * head.key_bytes;
  return *reinterpret_cast<const KeyHead*>(bank + offset);
}

// This thread's share of the key's squares.
TORCHKV_HOST_DEVICE inline Squares rate_share(
    const ParamsHead& head,
    const char* bank,
    uint32_t block,
    uint32_t thread) {
  const KeyHead& key = key_of_rate(head, bank, block);
  const auto* squares = static_cast<const Squares*>(pointers_of(key)[0]);
  Squares share{};
  for (int64_t i = thread; i < key.size; i += kThreads) {
    share += squares[i];
  }
  return share;
}

// By one thread, once all shares have been added.
TORCHKV_HOST_DEVICE inline void store_rate(
    const ParamsHead& head,
    const char* bank,
    size_t bank_bytes,
    uint32_t block,
    const Squares& squares) {
  const KeyHead& key = key_of_rate(head, bank, block);
  const auto* steps = reinterpret_cast<const RateStep*>(bank + bank_bytes);
  *static_cast<double*>(key.memory) = rate_of(*(steps - 1 - key.step), squares);
}

} // namespace torchkv::kernels::cuda

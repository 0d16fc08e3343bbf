#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>

#include "export.h"
#include "host_device.h"

namespace torchkv {

// An elementwise updater as data: a formula and its hyperparameters. Plain
// data, so that it can be copied per call (a changed learning rate takes effect
// at the next push), written to a file and sent to a server. Because a rule
// processes each element independently, it can run in the same pass as the sum
// (those that need norms have two). The formulas are in kernels/rules.h.
struct RuleSpec {
  enum class Id : uint16_t {
    kAssign = 0, // stored = sum of the values
    kSgd = 1,
    kAdam = 2, // AdamW, too: `decoupled`
    kAdagrad = 3,
    kRmsprop = 4,
    kLion = 5,
    kLamb = 6,
    // MXNet's, in kernels/mxnet_rules.h.
    kMxnetSgd = 7,
    kMxnetNag = 8,
    kMxnetSignum = 9,
    kMxnetAdam = 10,
    kMxnetAdamax = 11,
    kMxnetNadam = 12,
    kMxnetAdagrad = 13,
    kMxnetAdadelta = 14,
    kMxnetRmsprop = 15,
    kMxnetFtrl = 16,
    kMxnetFtml = 17,
    kMxnetDcasgd = 18,
    kMxnetTest = 19,
    kMxnetLamb = 20,
    kMxnetLars = 21,
    kMxnetLbsgd = 22,
    kMxnetSgld = 23,
    kMxnetGroupAdagrad = 24,
  };

  Id id = Id::kAssign;

  // Named as the arguments in torch.optim; `alpha` is that of RMSprop. A rule
  // ignores those that it does not use.
  double lr = 0;
  double weight_decay = 0;
  double momentum = 0;
  double dampening = 0;
  double beta1 = 0;
  double beta2 = 0;
  double alpha = 0;
  double eps = 0;
  double lr_decay = 0;
  double initial_accumulator_value = 0;
  // Of MXNet's rules, some of which have names of their own for the members
  // above, too. What the numbered ones are depends on the rule: see rule.cpp.
  double clip_gradient = 0; // 0 = off
  double extra1 = 0;
  double extra2 = 0;
  bool nesterov = false;
  bool maximize = false;
  bool amsgrad = false;
  bool centered = false;
  bool decoupled = false; // weight decay
  bool correction = false; // of LAMB's bias, or of LARS's momentum
};

// The maximum number of state tensors of a rule for a key, each like the stored
// value, at indices that do not depend on the rule's options.
constexpr size_t kMaxStates = 3;

// The names of the states in torch.optim; null if the rule does not use one.
TORCHKV_API std::array<const char*, kMaxStates> state_names(
    const RuleSpec& rule);

// Whether the rule steps each row, along the first dimension, by itself, but
// not each element.
inline bool is_row_wise(const RuleSpec& rule) {
  return rule.id == RuleSpec::Id::kMxnetGroupAdagrad;
}

// How LBSGD multiplies the learning rate: growing with the updates up to
// batch_scale, or by the norms of weight and gradient.
enum class WarmupStrategy : uint8_t { kLinear, kPower2, kSqrt, kLars };

inline WarmupStrategy warmup_strategy(const RuleSpec& lbsgd) {
  return static_cast<WarmupStrategy>(static_cast<int>(lbsgd.extra1));
}

// Whether the rule is LAMB: it needs the norms of the weight and of the
// direction of the step, which its first pass makes known.
TORCHKV_HOST_DEVICE inline bool is_lamb(RuleSpec::Id id) {
  return id == RuleSpec::Id::kLamb || id == RuleSpec::Id::kMxnetLamb;
}
inline bool is_lamb(const RuleSpec& rule) {
  return is_lamb(rule.id);
}

// Whether the learning rate depends on the norms of the weight and of the
// gradient. With these, a step is elementwise: scaled_by_norms().
inline bool needs_gradient_norm(const RuleSpec& rule) {
  using Id = RuleSpec::Id;
  return (rule.id == Id::kMxnetLars && rule.extra1 > 0) ||
      (rule.id == Id::kMxnetLbsgd &&
       warmup_strategy(rule) == WarmupStrategy::kLars);
}

// Whether a step depends on the norms of the whole value (core/step_rate.h).
inline bool has_norms(const RuleSpec& rule) {
  return is_lamb(rule) || needs_gradient_norm(rule);
}

// Whether the rule can be applied to shards of a value.
inline bool is_elementwise(const RuleSpec& rule) {
  return !is_row_wise(rule) && !has_norms(rule);
}

// Whether the rule can step the rows of a sparse gradient alone; and whether
// all that it needs are these rows.
inline bool can_step_rows(const RuleSpec& rule) {
  return !is_lamb(rule);
}
inline bool needs_only_rows(const RuleSpec& rule) {
  return is_row_wise(rule) || is_elementwise(rule);
}

// Whether new state of the rule is a copy of the weight.
inline bool begins_as_weight(const RuleSpec& rule, size_t state) {
  return rule.id == RuleSpec::Id::kMxnetDcasgd && state == 0;
}

// Whether it has random numbers.
inline bool is_random(const RuleSpec& rule) {
  return rule.id == RuleSpec::Id::kMxnetSgld;
}

// Whether it is one of MXNet's.
inline bool is_mxnet(const RuleSpec& rule) {
  return rule.id >= RuleSpec::Id::kMxnetSgd;
}

// The step of a rule for one key in one push.
struct RuleStep {
  RuleSpec rule;
  int64_t step = 1; // count of steps of the key, from 1
  bool is_first = true; // some of its state is new
  bool is_lazy = true; // row-sparse gradients step only their rows
  double scale = 1; // of the sum
  double clip_value = 0; // then clipped to [-clip_value, clip_value]; 0 = off
  double last_scale = 1; // then scaled again
  // Of random numbers: element i uses number stream + i.
  uint64_t stream = 0;
};

inline const RuleStep kAssignStep;

// The rule with this name ("sgd", "adam", "adamw", "adagrad", "rmsprop",
// "lion", "lamb", or one of MXNet's, such as "mxnet_sgd") and these
// hyperparameters; "adamw" is Adam with decoupled weight decay. Other
// hyperparameters have the defaults of torch.optim, or of MXNet. ValueError for
// an unknown name, or a hyperparameter that the rule does not have.
using NumbersByName = std::map<std::string, double>;
TORCHKV_API RuleSpec make_rule(
    const char* op,
    const std::string& rule,
    const NumbersByName& numbers);
TORCHKV_API NumbersByName numbers_of(const RuleSpec& rule);
TORCHKV_API const char* name_of(const RuleSpec& rule);

// Whether a number is finite in fp32, the arithmetic of fp32 values.
inline bool is_finite_float(double value) {
  return std::abs(value) <= std::numeric_limits<float>::max();
}

// A number that counts something; ValueError unless it is whole, at least
// `least` and exact in a double.
TORCHKV_API int64_t whole_number(
    const char* op,
    const std::string& name,
    double value,
    int64_t least);

// ValueError for an invalid hyperparameter.
TORCHKV_API void check_rule(const char* op, const RuleSpec& rule);

} // namespace torchkv

#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>

#include "export.h"

namespace torchkv {

// An elementwise updater as data: which formula, and its numbers. Plain data on
// purpose, so that it can be copied per call (a changed learning rate takes
// effect at the next push), written to a file and sent to a server. Because a
// rule touches each element alone, Comm may run it in the pass that sums (LAMB
// needs one more). The formulas are in kernels/rules.h.
struct RuleSpec {
  enum class Id : uint16_t {
    kAssign = 0, // stored = sum of the values
    kSgd = 1,
    kAdam = 2, // AdamW, too: `decoupled`
    kAdagrad = 3,
    kRmsprop = 4,
    kLion = 5,
    kLamb = 6,
  };

  Id id = Id::kAssign;

  // Named as torch.optim's arguments; `alpha` is that of RMSprop. A rule leaves
  // alone what it has no use for.
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
  bool nesterov = false;
  bool maximize = false;
  bool amsgrad = false;
  bool centered = false;
  bool decoupled = false; // weight decay
};

// State of a rule for a key: up to so many tensors like the stored value, in
// places that do not depend on the rule's options.
constexpr size_t kMaxStates = 3;

// torch.optim's name of a state, or null where the rule needs none there.
TORCHKV_API std::array<const char*, kMaxStates> state_names(
    const RuleSpec& rule);

// Whether the rule can do with parts of a sum and of the stored value: LAMB
// needs the norms of the whole.
inline bool is_elementwise(const RuleSpec& rule) {
  return rule.id != RuleSpec::Id::kLamb;
}

// What one push does to one key.
struct RuleStep {
  RuleSpec rule;
  int64_t step = 1; // of the key, from 1
  bool is_first = true; // of SGD's momentum: its buffer is new
  double scale = 1; // of the sum
  double clip_value = 0; // then to [-clip_value, clip_value]; 0 = not
  double last_scale = 1; // then
};

inline const RuleStep kAssignStep;

// A rule by its name ("sgd", "adam", "adamw", "adagrad", "rmsprop", "lion" or
// "lamb") and its hyperparameters by name; "adamw" is Adam whose weight decay
// is decoupled. ValueError for a name that is unknown, or not one of this rule.
// Hyperparameters that are not given have torch.optim's defaults.
using NumbersByName = std::map<std::string, double>;
TORCHKV_API RuleSpec make_rule(
    const char* op,
    const std::string& rule,
    const NumbersByName& numbers);
TORCHKV_API NumbersByName numbers_of(const RuleSpec& rule);
TORCHKV_API const char* name_of(const RuleSpec& rule);

// Whether a number is finite in fp32, too, in which fp32 values are stepped.
inline bool is_finite_float(double value) {
  return std::abs(value) <= std::numeric_limits<float>::max();
}

// ValueError where a number of the rule makes no sense.
TORCHKV_API void check_rule(const char* op, const RuleSpec& rule);

} // namespace torchkv

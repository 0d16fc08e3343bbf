#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "export.h"

namespace torchkv {

// An elementwise updater as data: which formula, and its numbers. Plain data on
// purpose, so that it can be copied per call (a changed learning rate takes
// effect at the next push), written to a file and sent to a server. Because a
// rule touches each element alone, Comm may run it in the pass that sums.
struct RuleSpec {
  enum class Id : uint16_t {
    kAssign = 0, // stored = sum of the values
    kSgd = 1, // stored -= learning_rate * (sum + weight_decay * stored)
  };

  Id id = Id::kAssign;
  double learning_rate = 0;
  double weight_decay = 0;
};

// The rule of an optimizer's name: "sgd". ValueError for any other name.
TORCHKV_API RuleSpec make_rule(
    const char* op,
    const std::string& optimizer,
    double learning_rate,
    double weight_decay);

// ValueError where a number of the rule makes no sense.
void check_rule(const char* op, const RuleSpec& rule);

// A rule as uint8 bytes; none = ASSIGN.
std::optional<at::Tensor> serialize_rule(const RuleSpec& rule);

// What serialize_rule wrote; none where the bytes are something else.
// ValueError for a rule that this version does not know.
std::optional<RuleSpec> load_rule(const at::Tensor& bytes);

} // namespace torchkv

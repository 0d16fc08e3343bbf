#pragma once

#include <cstdint>

#include "export.h"
#include "value.h"

namespace torchkv {

// An elementwise updater as data: which formula, and its numbers. Plain data on
// purpose, so that it can be copied per call (a changed learning rate takes
// effect at the next push), written to a file and sent to a server.
struct RuleSpec {
  enum Id : uint16_t { kAssign = 0 };

  uint16_t id = kAssign;
  uint16_t abi = 1;
  uint32_t flags = 0;
  double number[12] = {};
};

// What differs from key to key under one rule.
struct KeyArgs {
  double lr_mult = 1;
  double wd_mult = 1;
  int64_t step = 0;
};

// What the pipeline asks of a formula before it runs it.
class TORCHKV_API Rule {
 public:
  // Scalars that are known only after the sum; kNothing means that the rule
  // may run in the pass that sums.
  enum class Needs : uint8_t { kNothing };

  virtual ~Rule() = default;
  virtual Needs needs(const RuleSpec& spec) const = 0;
  virtual bool takes(Value::Form form) const = 0;
};

// The rule of spec.id; an unknown id is an internal error.
TORCHKV_API const Rule& find_rule(const RuleSpec& spec);

} // namespace torchkv

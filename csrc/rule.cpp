#include "rule.h"

#include "errors.h"

namespace torchkv {
namespace {

// stored = sum of the values
class AssignRule final : public Rule {
 public:
  Needs needs(const RuleSpec& /*spec*/) const override {
    return Needs::kNothing;
  }
  bool takes(Value::Form form) const override {
    return form == Value::Form::kDense;
  }
};

} // namespace

const Rule& find_rule(const RuleSpec& spec) {
  static const AssignRule assign;
  TORCHKV_INTERNAL_ASSERT(spec.id == RuleSpec::kAssign, "rule ", spec.id);
  return assign;
}

} // namespace torchkv

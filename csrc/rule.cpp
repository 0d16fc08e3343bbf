#include "rule.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <sstream>

namespace torchkv {
namespace {

// What a rule takes: its name, its options, and torch.optim's names of its
// states.
struct RuleInfo {
  RuleSpec::Id id;
  const char* name;
  std::array<const char*, kMaxStates> states;
};

constexpr std::array<RuleInfo, 7> kRules{{
    {RuleSpec::Id::kAssign, "assign", {}},
    {RuleSpec::Id::kSgd, "sgd", {"momentum_buffer"}},
    {RuleSpec::Id::kAdam, "adam", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}},
    {RuleSpec::Id::kAdagrad, "adagrad", {"sum"}},
    {RuleSpec::Id::kRmsprop,
     "rmsprop",
     {"square_avg", "grad_avg", "momentum_buffer"}},
    {RuleSpec::Id::kLion, "lion", {"exp_avg"}},
    {RuleSpec::Id::kLamb, "lamb", {"exp_avg", "exp_avg_sq"}},
}};

const RuleInfo& info_of(RuleSpec::Id id) {
  return kRules.at(static_cast<size_t>(id));
}

// The numbers, in the order in which messages list them. All are numbers of
// fp32, too, and less than `less_than`.
struct Number {
  const char* name;
  double RuleSpec::* member;
  double less_than = HUGE_VAL;
};

constexpr std::array<Number, 10> kNumbers{{
    {"lr", &RuleSpec::lr},
    {"weight_decay", &RuleSpec::weight_decay},
    {"momentum", &RuleSpec::momentum},
    {"dampening", &RuleSpec::dampening},
    {"beta1", &RuleSpec::beta1, 1},
    {"beta2", &RuleSpec::beta2, 1},
    {"alpha", &RuleSpec::alpha},
    {"eps", &RuleSpec::eps},
    {"lr_decay", &RuleSpec::lr_decay},
    {"initial_accumulator_value", &RuleSpec::initial_accumulator_value},
}};

struct Switch {
  const char* name;
  bool RuleSpec::* member;
};

constexpr std::array<Switch, 5> kSwitches{{
    {"nesterov", &RuleSpec::nesterov},
    {"maximize", &RuleSpec::maximize},
    {"amsgrad", &RuleSpec::amsgrad},
    {"centered", &RuleSpec::centered},
    {"decoupled", &RuleSpec::decoupled},
}};

// Numbers that are not given are those of torch.optim, or of the paper.
RuleSpec with_defaults(RuleSpec::Id id) {
  RuleSpec rule;
  rule.id = id;
  rule.lr = 1e-3;
  rule.beta1 = 0.9;
  rule.beta2 = 0.999;
  rule.alpha = 0.99;
  rule.eps = 1e-8;
  switch (id) {
    case RuleSpec::Id::kAdagrad:
      rule.lr = 1e-2;
      rule.eps = 1e-10;
      break;
    case RuleSpec::Id::kRmsprop:
      rule.lr = 1e-2;
      break;
    case RuleSpec::Id::kLion:
      rule.lr = 1e-4;
      rule.beta2 = 0.99;
      break;
    case RuleSpec::Id::kLamb:
      rule.eps = 1e-6;
      break;
    default:
      break;
  }
  return rule;
}

bool set_number(RuleSpec& rule, const std::string& name, double value) {
  for (const auto& number : kNumbers) {
    if (name == number.name) {
      rule.*number.member = value;
      return true;
    }
  }
  for (const auto& option : kSwitches) {
    if (name == option.name) {
      rule.*option.member = value != 0;
      return true;
    }
  }
  return false;
}

} // namespace

std::array<const char*, kMaxStates> state_names(const RuleSpec& rule) {
  auto names = info_of(rule.id).states;
  const auto needs = [&](size_t place, bool needed) {
    if (!needed) {
      names[place] = nullptr;
    }
  };
  if (rule.id == RuleSpec::Id::kSgd) {
    needs(0, rule.momentum != 0);
  } else if (rule.id == RuleSpec::Id::kAdam) {
    needs(2, rule.amsgrad);
  } else if (rule.id == RuleSpec::Id::kRmsprop) {
    needs(1, rule.centered);
    needs(2, rule.momentum > 0);
  }
  return names;
}

const char* name_of(const RuleSpec& rule) {
  return info_of(rule.id).name;
}

RuleSpec make_rule(
    const char* op,
    const std::string& rule,
    const NumbersByName& numbers) {
  RuleSpec result;
  std::ostringstream names;
  bool is_known = false;
  for (const auto& info : kRules) {
    if (info.id == RuleSpec::Id::kAssign) {
      continue; // no optimizer
    }
    if (rule == info.name) {
      result = with_defaults(info.id);
      is_known = true;
    }
    names << (info.id == RuleSpec::Id::kSgd ? "'" : ", '") << info.name << '\'';
  }
  TORCH_CHECK_VALUE(
      is_known,
      op,
      ": expected an optimizer out of ",
      names.str(),
      ", but got '",
      rule,
      "'");
  for (const auto& [name, value] : numbers) {
    TORCH_CHECK_VALUE(
        set_number(result, name, value),
        op,
        ": expected a number that the optimizer '",
        rule,
        "' knows, but got '",
        name,
        "'");
  }
  check_rule(op, result);
  return result;
}

NumbersByName numbers_of(const RuleSpec& rule) {
  NumbersByName result;
  for (const auto& number : kNumbers) {
    result[number.name] = rule.*number.member;
  }
  for (const auto& option : kSwitches) {
    result[option.name] = rule.*option.member ? 1 : 0;
  }
  return result;
}

void check_rule(const char* op, const RuleSpec& rule) {
  for (const auto& number : kNumbers) {
    const double value = rule.*number.member;
    // Dampening alone may be negative, as in torch.optim.SGD.
    const bool in_range = is_finite_float(value) &&
        (number.member == &RuleSpec::dampening ||
         (value >= 0 && value < number.less_than));
    TORCH_CHECK_VALUE(
        in_range,
        op,
        ": expected a ",
        number.name,
        " of at least 0",
        number.less_than == 1 ? " and less than 1" : " that is finite in fp32",
        ", but got ",
        value);
  }
  TORCH_CHECK_VALUE(
      !rule.nesterov || (rule.momentum > 0 && rule.dampening == 0),
      op,
      ": expected a momentum greater than 0 and no dampening with nesterov, but "
      "got momentum ",
      rule.momentum,
      " and dampening ",
      rule.dampening);
}

} // namespace torchkv

#include "rule.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "text.h"

namespace torchkv {
namespace {

// A rule's name, torch.optim's names of its states, and its hyperparameters
// besides lr, weight_decay and maximize, which all rules have.
struct RuleInfo {
  RuleSpec::Id id;
  const char* name;
  std::array<const char*, kMaxStates> states;
  std::array<const char*, 5> options;
};

// In the order of the ids.
constexpr std::array<RuleInfo, 7> kRules{{
    {RuleSpec::Id::kAssign, "assign", {}, {}},
    {RuleSpec::Id::kSgd,
     "sgd",
     {"momentum_buffer"},
     {"momentum", "dampening", "nesterov"}},
    {RuleSpec::Id::kAdam,
     "adam",
     {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
     {"beta1", "beta2", "eps", "amsgrad", "decoupled"}},
    {RuleSpec::Id::kAdagrad,
     "adagrad",
     {"sum"},
     {"eps", "lr_decay", "initial_accumulator_value"}},
    {RuleSpec::Id::kRmsprop,
     "rmsprop",
     {"square_avg", "grad_avg", "momentum_buffer"},
     {"alpha", "eps", "momentum", "centered"}},
    {RuleSpec::Id::kLion, "lion", {"exp_avg"}, {"beta1", "beta2"}},
    {RuleSpec::Id::kLamb,
     "lamb",
     {"exp_avg", "exp_avg_sq"},
     {"beta1", "beta2", "eps"}},
}};

// Adam with decoupled weight decay.
constexpr const char* kAdamw = "adamw";

const RuleInfo& info_of(RuleSpec::Id id) {
  return kRules.at(static_cast<size_t>(id));
}

// The rule with this name, or null.
const RuleInfo* find_rule(const std::string& name) {
  const std::string formula = name == kAdamw ? "adam" : name;
  const auto* const found =
      std::find_if(kRules.begin() + 1, kRules.end(), [&](const RuleInfo& info) {
        return formula == info.name;
      });
  return found == kRules.end() ? nullptr : found;
}

bool has_option(const RuleInfo& info, const std::string& name) {
  const auto is_name = [&](const char* option) {
    return option != nullptr && name == option;
  };
  return name == "lr" || name == "weight_decay" || name == "maximize" ||
      std::any_of(info.options.begin(), info.options.end(), is_name);
}

// The hyperparameters in the order of error messages. All must be finite in
// fp32 and less than `less_than`.
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

// The defaults of torch.optim or, for Lion and LAMB, of the papers.
RuleSpec with_defaults(RuleSpec::Id id, bool decoupled) {
  RuleSpec rule;
  rule.id = id;
  rule.decoupled = decoupled;
  rule.weight_decay = decoupled ? 1e-2 : 0;
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

void set_number(RuleSpec& rule, const std::string& name, double value) {
  for (const auto& number : kNumbers) {
    if (name == number.name) {
      rule.*number.member = value;
    }
  }
  for (const auto& option : kSwitches) {
    if (name == option.name) {
      rule.*option.member = value != 0;
    }
  }
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
  return rule.decoupled ? kAdamw : info_of(rule.id).name;
}

RuleSpec make_rule(
    const char* op,
    const std::string& rule,
    const NumbersByName& numbers) {
  const RuleInfo* info = find_rule(rule);
  if (info == nullptr) {
    std::vector<std::string> names{kAdamw};
    for (const auto& known : kRules) {
      if (known.id != RuleSpec::Id::kAssign) {
        names.emplace_back(known.name);
      }
    }
    TORCH_CHECK_VALUE(
        false,
        op,
        ": unknown optimizer ",
        quoted(rule),
        "; expected one of ",
        listed(names),
        did_you_mean(rule, names));
  }
  RuleSpec result = with_defaults(info->id, rule == kAdamw);
  for (const auto& [name, value] : numbers) {
    if (!has_option(*info, name)) {
      std::vector<std::string> names;
      for (const auto& [known, number] : numbers_of(result)) {
        names.push_back(known);
      }
      TORCH_CHECK_VALUE(
          false,
          op,
          ": unexpected hyperparameter ",
          quoted(name),
          " for optimizer '",
          rule,
          "'; expected one of ",
          listed(names),
          did_you_mean(name, names));
    }
    set_number(result, name, value);
  }
  check_rule(op, result);
  return result;
}

NumbersByName numbers_of(const RuleSpec& rule) {
  const RuleInfo& info = info_of(rule.id);
  NumbersByName result;
  for (const auto& number : kNumbers) {
    if (has_option(info, number.name)) {
      result[number.name] = rule.*number.member;
    }
  }
  for (const auto& option : kSwitches) {
    if (has_option(info, option.name)) {
      result[option.name] = rule.*option.member ? 1 : 0;
    }
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

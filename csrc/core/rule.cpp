#include "rule.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "rule_table.h"
#include "text.h"

namespace torchkv {
namespace {

using rule_table::kNumbers;
using rule_table::kRules;
using rule_table::kSwitches;
using rule_table::RuleInfo;

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
  if (rule.id == RuleSpec::Id::kAdam) {
    needs(2, rule.amsgrad);
  } else if (rule.id == RuleSpec::Id::kRmsprop) {
    needs(1, rule.centered);
    needs(2, rule.momentum > 0);
  } else if (rule.id == RuleSpec::Id::kMxnetRmsprop) {
    needs(1, rule.centered);
    needs(2, rule.centered);
  } else if (rule.id == RuleSpec::Id::kMxnetDcasgd) {
    needs(1, rule.momentum != 0);
  } else if (
      rule.id == RuleSpec::Id::kSgd || rule.id == RuleSpec::Id::kMxnetSgd ||
      rule.id == RuleSpec::Id::kMxnetNag ||
      rule.id == RuleSpec::Id::kMxnetSignum ||
      rule.id == RuleSpec::Id::kMxnetLars ||
      rule.id == RuleSpec::Id::kMxnetLbsgd) {
    needs(0, rule.momentum != 0);
  }
  return names;
}

int64_t whole_number(
    const char* op,
    const std::string& name,
    double value,
    int64_t least) {
  constexpr double kMost = 9007199254740991; // 2^53 may be a rounded number
  TORCH_CHECK_VALUE(
      value >= static_cast<double>(least) && value == std::floor(value),
      op,
      ": expected ",
      name,
      " to be a whole number of at least ",
      least,
      ", but got ",
      value);
  TORCH_CHECK_VALUE(
      value <= kMost,
      op,
      ": expected ",
      name,
      " to be less than 2**53, but got ",
      value);
  return static_cast<int64_t>(value);
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
  RuleSpec result = rule_table::with_defaults(info->id, rule == kAdamw);
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
  const RuleInfo& info = info_of(rule.id);
  for (const auto& number : kNumbers) {
    if (!has_option(info, number.name)) {
      continue;
    }
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
  TORCH_CHECK_VALUE(
      rule.id != RuleSpec::Id::kMxnetGroupAdagrad || rule.weight_decay == 0,
      op,
      ": expected no weight_decay with GroupAdaGrad, but got ",
      rule.weight_decay);
  TORCH_CHECK_VALUE(
      rule.id != RuleSpec::Id::kMxnetLbsgd || rule.alpha >= 1,
      op,
      ": expected a batch_scale of at least 1, but got ",
      rule.alpha);
  if (rule.id == RuleSpec::Id::kMxnetSgld) {
    whole_number(op, "seed", rule.extra1, 0);
  }
}

} // namespace torchkv

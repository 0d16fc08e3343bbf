#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "core/rule.h"

namespace torchkv::testing {

struct RuleCase {
  std::string name;
  RuleSpec rule;
};

inline void PrintTo(const RuleCase& rule, std::ostream* out) {
  *out << rule.name;
}

// Every rule with every option, and hyperparameters other than the defaults.
inline const std::vector<RuleCase>& rule_cases() {
  static const std::vector<RuleCase> all = [] {
    std::vector<RuleCase> cases;
    const auto add =
        [&](const char* options, const char* rule, NumbersByName numbers) {
          numbers.emplace("lr", 0.05);
          cases.push_back(
              {std::string(rule) + options, make_rule("test", rule, numbers)});
        };
    add("", "sgd", {});
    add("_decay", "sgd", {{"weight_decay", 0.1}});
    add("_momentum", "sgd", {{"momentum", 0.9}, {"weight_decay", 0.1}});
    add("_dampening", "sgd", {{"momentum", 0.8}, {"dampening", 0.3}});
    add("_nesterov",
        "sgd",
        {{"momentum", 0.9}, {"nesterov", 1}, {"weight_decay", 0.1}});
    add("_maximize", "sgd", {{"maximize", 1}, {"weight_decay", 0.1}});
    const NumbersByName adam{
        {"beta1", 0.8}, {"beta2", 0.95}, {"eps", 1e-6}, {"weight_decay", 0.1}};
    const auto with = [](NumbersByName numbers, const NumbersByName& more) {
      numbers.insert(more.begin(), more.end());
      return numbers;
    };
    add("", "adam", adam);
    add("_plain", "adam", {});
    add("_far", "adam", {{"beta1", 0.3}, {"beta2", 0.4}}); // lerp's other half
    add("_amsgrad", "adam", with(adam, {{"amsgrad", 1}}));
    add("w", "adam", with(adam, {{"decoupled", 1}}));
    add("w_amsgrad", "adam", with(adam, {{"decoupled", 1}, {"amsgrad", 1}}));
    add("w_maximize", "adam", with(adam, {{"decoupled", 1}, {"maximize", 1}}));
    add("",
        "adagrad",
        {{"lr_decay", 0.1},
         {"initial_accumulator_value", 0.5},
         {"eps", 1e-4},
         {"weight_decay", 0.1}});
    const NumbersByName rmsprop{
        {"alpha", 0.9}, {"eps", 1e-2}, {"weight_decay", 0.1}};
    add("", "rmsprop", rmsprop);
    add("_centered", "rmsprop", with(rmsprop, {{"centered", 1}}));
    add("_momentum", "rmsprop", with(rmsprop, {{"momentum", 0.8}}));
    add("_both",
        "rmsprop",
        with(rmsprop, {{"momentum", 0.8}, {"centered", 1}}));
    add("", "lion", {{"beta1", 0.8}, {"beta2", 0.9}, {"weight_decay", 0.1}});
    add("_maximize", "lion", {{"maximize", 1}});
    add("", "lamb", adam);
    add("_plain", "lamb", {});
    add("_maximize", "lamb", with(adam, {{"maximize", 1}}));
    return cases;
  }();
  return all;
}

// Steps of a rule with every way to scale and clip gradients.
inline std::vector<RuleStep> steps_of(const RuleSpec& rule) {
  RuleStep first;
  first.rule = rule;
  RuleStep later = first;
  later.step = 7;
  later.is_first = false;
  RuleStep scaled = later;
  scaled.scale = 0.375;
  RuleStep clipped = later;
  clipped.scale = 2;
  clipped.clip_value = 0.5;
  clipped.last_scale = 0.3;
  return {first, later, scaled, clipped};
}

} // namespace torchkv::testing

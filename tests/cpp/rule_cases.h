#pragma once

#include <algorithm>
#include <iterator>
#include <ostream>
#include <string>
#include <vector>

#include "core/rule.h"
#include "core/step_rate.h"

namespace torchkv::testing {

struct RuleCase {
  std::string name;
  RuleSpec rule;
};

inline void PrintTo(const RuleCase& rule, std::ostream* out) {
  *out << rule.name;
}

// Every rule but GroupAdaGrad with every option, and hyperparameters other than
// the defaults.
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
    const NumbersByName decay{{"weight_decay", 0.1}};
    const NumbersByName clip{{"weight_decay", 0.1}, {"clip_gradient", 0.3}};
    for (const char* rule : {"mxnet_sgd", "mxnet_nag", "mxnet_dcasgd"}) {
      add("", rule, clip);
      add("_momentum", rule, with(decay, {{"momentum", 0.9}}));
    }
    add("_plain", "mxnet_sgd", {});
    add("_maximize", "mxnet_sgd", {{"maximize", 1}});
    add("", "mxnet_signum", with(clip, {{"wd_lh", 0.2}}));
    add("_plain", "mxnet_signum", {});
    add("_sign", "mxnet_signum", with(decay, {{"momentum", 0}}));
    const NumbersByName betas{{"beta1", 0.8}, {"beta2", 0.95}};
    add("", "mxnet_adam", with(betas, {{"epsilon", 1e-4}}));
    add("_clip", "mxnet_adam", clip);
    add("", "mxnet_adamax", with(clip, betas));
    add("_plain", "mxnet_adamax", {});
    add("", "mxnet_nadam", with(clip, {{"schedule_decay", 0.3}}));
    add("_constant", "mxnet_nadam", with(betas, {{"schedule_decay", 0}}));
    add("", "mxnet_adagrad", with(clip, {{"eps", 1e-2}}));
    add("_plain", "mxnet_adagrad", {});
    add("", "mxnet_adadelta", with(clip, {{"rho", 0.7}, {"epsilon", 1e-2}}));
    add("", "mxnet_rmsprop", with(clip, {{"epsilon", 1e-2}}));
    add("_limit",
        "mxnet_rmsprop",
        with(decay, {{"clip_weights", 0.5}, {"gamma1", 0.7}}));
    add("_centered",
        "mxnet_rmsprop",
        with(clip, {{"centered", 1}, {"epsilon", 1e-1}}));
    add("", "mxnet_ftrl", with(clip, {{"lamda1", 0.1}, {"beta", 2}}));
    add("", "mxnet_ftml", with(clip, betas));
    add("", "mxnet_test", decay);
    add("", "mxnet_sgld", with(clip, {{"seed", 7}}));
    const NumbersByName lamb = with(clip, betas);
    add("", "mxnet_lamb", with(lamb, {{"lower_bound", 20}}));
    add("_plain", "mxnet_lamb", {{"bias_correction", 0}, {"upper_bound", 2}});
    add("", "mxnet_lars", with(clip, {{"momentum", 0.9}, {"eps", 0.5}}));
    add("_plain", "mxnet_lars", {{"eta", 0.5}});
    add("_uncorrected",
        "mxnet_lars",
        with(decay, {{"momentum", 0.9}, {"momentum_correction", 0}}));
    add("_unscaled", "mxnet_lars", with(clip, {{"momentum", 0.9}, {"eta", 0}}));
    const NumbersByName batch = with(clip, {{"batch_scale", 3}});
    for (const double strategy : {0, 1, 2, 3}) {
      add(("_" + std::to_string(static_cast<int>(strategy))).c_str(),
          "mxnet_lbsgd",
          with(
              batch,
              {{"warmup_strategy", strategy},
               {"warmup_updates", 10},
               {"momentum", 0.9}}));
    }
    return cases;
  }();
  return all;
}

// Whether the number of steps is in the rule's formula.
inline bool has_step_count(const RuleSpec& rule) {
  switch (rule.id) {
    case RuleSpec::Id::kAdam:
    case RuleSpec::Id::kLamb:
    case RuleSpec::Id::kMxnetAdam:
    case RuleSpec::Id::kMxnetAdamax:
    case RuleSpec::Id::kMxnetNadam:
    case RuleSpec::Id::kMxnetFtml:
    case RuleSpec::Id::kMxnetSgld: // its random numbers
      return true;
    case RuleSpec::Id::kMxnetLamb:
      return rule.correction;
    case RuleSpec::Id::kMxnetLbsgd:
      return warmup_strategy(rule) != WarmupStrategy::kLars;
    default:
      return rule.lr_decay != 0;
  }
}

// Steps of a rule with every way to scale and clip gradients.
inline std::vector<RuleStep> steps_of(const RuleSpec& rule) {
  RuleStep first;
  first.rule = rule;
  first.stream = 12345;
  first = without_norms(first);
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

inline std::vector<RuleCase> rule_cases_that(bool (*are)(const RuleSpec&)) {
  std::vector<RuleCase> cases;
  std::copy_if(
      rule_cases().begin(),
      rule_cases().end(),
      std::back_inserter(cases),
      [&](const RuleCase& rule) { return are(rule.rule); });
  return cases;
}

} // namespace torchkv::testing

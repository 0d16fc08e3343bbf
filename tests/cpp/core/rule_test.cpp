// Rules as data: names, hyperparameters by name, and validation.
#include "core/rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "error_text.h"
#include "rule_cases.h"

namespace torchkv {
namespace {

using testing::error_text;
using testing::rule_cases;

std::string refusal(const std::string& rule, const NumbersByName& numbers) {
  return error_text([&] { make_rule("test", rule, numbers); });
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(RuleTest, NumbersRoundTrip) {
  for (const auto& [name, rule] : rule_cases()) {
    const auto numbers = numbers_of(rule);
    const RuleSpec copy = make_rule("test", name_of(rule), numbers);
    EXPECT_EQ(copy.id, rule.id) << name;
    EXPECT_EQ(copy.decoupled, rule.decoupled) << name;
    EXPECT_EQ(numbers_of(copy), numbers) << name;
  }
}

// The hyperparameters of each rule besides lr, weight_decay and maximize.
const std::map<std::string, std::vector<std::string>>& options_by_rule() {
  static const std::map<std::string, std::vector<std::string>> options{
      {"sgd", {"momentum", "dampening", "nesterov"}},
      {"adam", {"beta1", "beta2", "eps", "amsgrad", "decoupled"}},
      {"adamw", {"beta1", "beta2", "eps", "amsgrad", "decoupled"}},
      {"adagrad", {"eps", "lr_decay", "initial_accumulator_value"}},
      {"rmsprop", {"alpha", "eps", "momentum", "centered"}},
      {"lion", {"beta1", "beta2"}},
      {"lamb", {"beta1", "beta2", "eps"}},
      {"mxnet_sgd", {"momentum", "clip_gradient"}},
      {"mxnet_nag", {"momentum", "clip_gradient"}},
      {"mxnet_signum", {"momentum", "wd_lh", "clip_gradient"}},
      {"mxnet_adam", {"beta1", "beta2", "epsilon", "clip_gradient"}},
      {"mxnet_adamax", {"beta1", "beta2", "clip_gradient"}},
      {"mxnet_nadam",
       {"beta1", "beta2", "epsilon", "schedule_decay", "clip_gradient"}},
      {"mxnet_adagrad", {"eps", "clip_gradient"}},
      {"mxnet_adadelta", {"rho", "epsilon", "clip_gradient"}},
      {"mxnet_rmsprop",
       {"gamma1",
        "gamma2",
        "epsilon",
        "centered",
        "clip_weights",
        "clip_gradient"}},
      {"mxnet_ftrl", {"lamda1", "beta", "clip_gradient"}},
      {"mxnet_ftml", {"beta1", "beta2", "epsilon", "clip_gradient"}},
      {"mxnet_dcasgd", {"momentum", "lamda", "clip_gradient"}},
      {"mxnet_test", {"clip_gradient"}},
      {"mxnet_lamb",
       {"beta1",
        "beta2",
        "epsilon",
        "lower_bound",
        "upper_bound",
        "bias_correction",
        "clip_gradient"}},
      {"mxnet_lars",
       {"momentum", "eta", "eps", "momentum_correction", "clip_gradient"}},
      {"mxnet_lbsgd",
       {"momentum",
        "warmup_strategy",
        "warmup_updates",
        "begin_update",
        "batch_scale",
        "clip_gradient"}},
      {"mxnet_sgld", {"seed", "clip_gradient"}},
      {"mxnet_groupadagrad", {"eps", "clip_gradient"}}};
  return options;
}

TEST(RuleTest, EachNumberHasAName) {
  const RuleSpec sgd = make_rule(
      "test",
      "sgd",
      {{"lr", 1},
       {"weight_decay", 2},
       {"momentum", 3},
       {"dampening", 0},
       {"nesterov", 1},
       {"maximize", 1}});
  EXPECT_EQ(sgd.lr, 1);
  EXPECT_EQ(sgd.weight_decay, 2);
  EXPECT_EQ(sgd.momentum, 3);
  EXPECT_EQ(sgd.dampening, 0);
  EXPECT_TRUE(sgd.nesterov);
  EXPECT_TRUE(sgd.maximize);
  const RuleSpec adam = make_rule(
      "test",
      "adam",
      {{"beta1", 0.4}, {"beta2", 0.5}, {"amsgrad", 1}, {"decoupled", 1}});
  EXPECT_EQ(adam.beta1, 0.4);
  EXPECT_EQ(adam.beta2, 0.5);
  EXPECT_TRUE(adam.amsgrad);
  EXPECT_TRUE(adam.decoupled);
  const RuleSpec rmsprop =
      make_rule("test", "rmsprop", {{"alpha", 6}, {"eps", 7}, {"centered", 1}});
  EXPECT_EQ(rmsprop.alpha, 6);
  EXPECT_EQ(rmsprop.eps, 7);
  EXPECT_TRUE(rmsprop.centered);
  const RuleSpec adagrad = make_rule(
      "test", "adagrad", {{"lr_decay", 8}, {"initial_accumulator_value", 9}});
  EXPECT_EQ(adagrad.lr_decay, 8);
  EXPECT_EQ(adagrad.initial_accumulator_value, 9);
}

// torch.optim.AdamW is Adam with decoupled weight decay, by default 1e-2.
TEST(RuleTest, AdamwIsAdam) {
  const RuleSpec adamw = make_rule("test", "adamw", {{"lr", 0.5}});
  EXPECT_EQ(adamw.id, RuleSpec::Id::kAdam);
  EXPECT_TRUE(adamw.decoupled);
  EXPECT_EQ(adamw.weight_decay, 1e-2);
  EXPECT_EQ(adamw.lr, 0.5);
  EXPECT_STREQ(name_of(adamw), "adamw");
  const RuleSpec adam = make_rule("test", "adam", {});
  EXPECT_FALSE(adam.decoupled);
  EXPECT_EQ(adam.weight_decay, 0);
  EXPECT_STREQ(name_of(adam), "adam");
}

TEST(RuleTest, EachRuleTakesOnlyItsOwnNumbers) {
  for (const auto& [rule, own] : options_by_rule()) {
    NumbersByName numbers = numbers_of(make_rule("test", rule, {}));
    EXPECT_EQ(numbers.size(), own.size() + 3) << rule;
    for (const auto& [other, options] : options_by_rule()) {
      for (const auto& name : options) {
        const bool is_own = std::count(own.begin(), own.end(), name) != 0;
        EXPECT_EQ(numbers.count(name), is_own ? 1 : 0) << rule << ' ' << name;
        if (!is_own) {
          const auto text = refusal(rule, {{name, 0}});
          EXPECT_TRUE(
              has(text,
                  "unexpected hyperparameter '" + name + "' for optimizer '" +
                      rule + "'"))
              << text;
        }
      }
    }
  }
}

TEST(RuleTest, DefaultsAreThoseOfTorchOptim) {
  const auto expect = [](const char* name, const NumbersByName& expected) {
    const auto numbers = numbers_of(make_rule("test", name, {}));
    for (const auto& [number, value] : expected) {
      EXPECT_EQ(numbers.count(number), 1) << name << ' ' << number;
    }
    for (const auto& [number, value] : numbers) {
      EXPECT_EQ(value, expected.count(number) == 0 ? 0 : expected.at(number))
          << name << ' ' << number;
    }
  };
  expect("sgd", {{"lr", 1e-3}});
  expect(
      "adam", {{"lr", 1e-3}, {"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}});
  expect(
      "adagrad",
      {{"lr", 1e-2},
       {"eps", 1e-10},
       {"lr_decay", 0},
       {"initial_accumulator_value", 0}});
  expect("rmsprop", {{"lr", 1e-2}, {"alpha", 0.99}, {"eps", 1e-8}});
  expect("lion", {{"lr", 1e-4}, {"beta1", 0.9}, {"beta2", 0.99}});
  expect(
      "lamb", {{"lr", 1e-3}, {"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-6}});
}

// Names that share a member of RuleSpec keep their own numbers.
TEST(RuleTest, EachNumberOfARuleIsItsOwn) {
  for (const auto& [rule, own] : options_by_rule()) {
    NumbersByName numbers = numbers_of(make_rule("test", rule, {}));
    double value = 1;
    for (auto& [name, number] : numbers) {
      // Switches stay as they are, and others differ.
      const bool is_beta = name == "beta1" || name == "beta2";
      const bool is_plain = name == "nesterov" || name == "dampening" ||
          name == "decoupled" || name == "weight_decay" || name == "maximize" ||
          name == "amsgrad" || name == "centered" ||
          name.find("correction") != std::string::npos;
      if (!is_plain) {
        number = (value += 1) / (is_beta ? 100 : 1);
      }
    }
    EXPECT_EQ(numbers_of(make_rule("test", rule, numbers)), numbers) << rule;
  }
}

TEST(RuleTest, LimitsOfSingleRules) {
  EXPECT_TRUE(
      has(refusal("mxnet_sgld", {{"seed", 0.5}}),
          "expected seed to be a whole number"));
  EXPECT_TRUE(
      has(refusal("mxnet_groupadagrad", {{"weight_decay", 0.1}}),
          "expected no weight_decay"));
  EXPECT_TRUE(
      has(refusal("mxnet_lbsgd", {{"batch_scale", 0.5}}),
          "a batch_scale of at least 1"));
}

TEST(RuleTest, StatesByName) {
  const auto names = [](const char* rule, const NumbersByName& numbers) {
    std::vector<std::string> result;
    for (const char* name : state_names(make_rule("test", rule, numbers))) {
      result.emplace_back(name == nullptr ? "-" : name);
    }
    return result;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names("sgd", {}), (Names{"-", "-", "-"}));
  EXPECT_EQ(
      names("sgd", {{"momentum", 0.9}}), (Names{"momentum_buffer", "-", "-"}));
  EXPECT_EQ(names("adam", {}), (Names{"exp_avg", "exp_avg_sq", "-"}));
  EXPECT_EQ(
      names("adam", {{"amsgrad", 1}}),
      (Names{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}));
  EXPECT_EQ(names("adagrad", {}), (Names{"sum", "-", "-"}));
  EXPECT_EQ(names("rmsprop", {}), (Names{"square_avg", "-", "-"}));
  EXPECT_EQ(
      names("rmsprop", {{"centered", 1}}),
      (Names{"square_avg", "grad_avg", "-"}));
  EXPECT_EQ(
      names("rmsprop", {{"momentum", 0.9}}),
      (Names{"square_avg", "-", "momentum_buffer"}));
  EXPECT_EQ(names("lion", {}), (Names{"exp_avg", "-", "-"}));
  EXPECT_EQ(names("lamb", {}), (Names{"exp_avg", "exp_avg_sq", "-"}));
  for (const char* rule :
       {"mxnet_sgd",
        "mxnet_nag",
        "mxnet_signum",
        "mxnet_lars",
        "mxnet_lbsgd"}) {
    EXPECT_EQ(names(rule, {{"momentum", 0}}), (Names{"-", "-", "-"})) << rule;
    EXPECT_EQ(names(rule, {{"momentum", 0.5}}), (Names{"mom", "-", "-"}))
        << rule;
  }
  EXPECT_EQ(names("mxnet_dcasgd", {}), (Names{"previous_weight", "-", "-"}));
  EXPECT_EQ(
      names("mxnet_dcasgd", {{"momentum", 0.5}}),
      (Names{"previous_weight", "mom", "-"}));
  EXPECT_EQ(names("mxnet_rmsprop", {}), (Names{"n", "-", "-"}));
  EXPECT_EQ(
      names("mxnet_rmsprop", {{"centered", 1}}), (Names{"n", "g", "delta"}));
  EXPECT_EQ(names("mxnet_ftml", {}), (Names{"d", "v", "z"}));
}

TEST(RuleTest, UnknownNamesAreErrorsThatListTheKnownOnes) {
  for (const char* name : {"", "SGD", "adamax", "assign"}) {
    const auto text = refusal(name, {});
    EXPECT_TRUE(has(text, std::string("unknown optimizer '") + name + "'"))
        << text;
    EXPECT_TRUE(has(
        text, "'adamw', 'sgd', 'adam', 'adagrad', 'rmsprop', 'lion', 'lamb'"))
        << text;
    EXPECT_FALSE(has(text, "'assign',")) << text;
  }
  EXPECT_TRUE(has(refusal("adamax", {}), "did you mean 'adam"));
  EXPECT_TRUE(has(refusal("sgd", {{"learning_rate", 1}}), "'learning_rate'"));
  EXPECT_TRUE(has(refusal("adam", {{"betas1", 1}}), "did you mean 'beta1'"));
}

TEST(RuleTest, InvalidNumbersAreErrors) {
  const std::vector<std::pair<const char*, const char*>> numbers{
      {"sgd", "lr"},
      {"sgd", "weight_decay"},
      {"sgd", "momentum"},
      {"sgd", "dampening"},
      {"adam", "beta1"},
      {"adam", "beta2"},
      {"rmsprop", "alpha"},
      {"adam", "eps"},
      {"adagrad", "lr_decay"},
      {"adagrad", "initial_accumulator_value"}};
  for (const auto& [rule, name] : numbers) {
    for (const double value :
         {double(NAN), double(INFINITY), -double(INFINITY), 3.5e38}) {
      EXPECT_TRUE(
          has(refusal(rule, {{name, value}}),
              std::string("expected a ") + name + " of at least 0"))
          << name << ' ' << value;
    }
    if (std::string(name) != "dampening") {
      EXPECT_TRUE(has(refusal(rule, {{name, -1e-300}}), name));
    }
  }
  EXPECT_EQ(refusal("sgd", {{"dampening", -3}, {"momentum", 0.9}}), "no error");
  EXPECT_TRUE(has(refusal("adam", {{"beta1", 1}}), "less than 1"));
  EXPECT_TRUE(has(refusal("lamb", {{"beta2", 1.5}}), "less than 1"));
  EXPECT_EQ(refusal("rmsprop", {{"alpha", 1}}), "no error");
  EXPECT_EQ(refusal("adam", {{"beta1", 0}, {"beta2", 0}}), "no error");
}

TEST(RuleTest, NesterovRequiresMomentumWithoutDampening) {
  EXPECT_TRUE(has(refusal("sgd", {{"nesterov", 1}}), "momentum 0"));
  EXPECT_TRUE(has(
      refusal("sgd", {{"nesterov", 1}, {"momentum", 0.9}, {"dampening", 0.25}}),
      "dampening 0.25"));
  EXPECT_EQ(refusal("sgd", {{"nesterov", 1}, {"momentum", 0.9}}), "no error");
}

} // namespace
} // namespace torchkv

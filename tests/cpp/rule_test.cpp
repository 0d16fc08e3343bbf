// Rules as data: names, numbers by name, and what is refused.
#include "rule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
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

TEST(RuleTest, NumbersThereAndBack) {
  for (const auto& [name, rule] : rule_cases()) {
    const auto numbers = numbers_of(rule);
    EXPECT_EQ(numbers.size(), 15) << name;
    const RuleSpec copy = make_rule("test", name_of(rule), numbers);
    EXPECT_EQ(copy.id, rule.id) << name;
    EXPECT_EQ(numbers_of(copy), numbers) << name;
  }
}

TEST(RuleTest, EachNumberHasItsName) {
  const RuleSpec rule = make_rule(
      "test",
      "sgd",
      {{"lr", 1},
       {"weight_decay", 2},
       {"momentum", 3},
       {"dampening", 0},
       {"beta1", 0.4},
       {"beta2", 0.5},
       {"alpha", 6},
       {"eps", 7},
       {"lr_decay", 8},
       {"initial_accumulator_value", 9},
       {"nesterov", 1},
       {"maximize", 1},
       {"amsgrad", 1},
       {"centered", 1},
       {"decoupled", 1}});
  EXPECT_EQ(rule.lr, 1);
  EXPECT_EQ(rule.weight_decay, 2);
  EXPECT_EQ(rule.momentum, 3);
  EXPECT_EQ(rule.dampening, 0);
  EXPECT_EQ(rule.beta1, 0.4);
  EXPECT_EQ(rule.beta2, 0.5);
  EXPECT_EQ(rule.alpha, 6);
  EXPECT_EQ(rule.eps, 7);
  EXPECT_EQ(rule.lr_decay, 8);
  EXPECT_EQ(rule.initial_accumulator_value, 9);
  EXPECT_TRUE(rule.nesterov);
  EXPECT_TRUE(rule.maximize);
  EXPECT_TRUE(rule.amsgrad);
  EXPECT_TRUE(rule.centered);
  EXPECT_TRUE(rule.decoupled);
}

TEST(RuleTest, DefaultsAreThoseOfTorchOptim) {
  const auto expect = [](const char* name, const NumbersByName& expected) {
    const auto numbers = numbers_of(make_rule("test", name, {}));
    for (const auto& [number, value] : expected) {
      EXPECT_EQ(numbers.at(number), value) << name << ' ' << number;
    }
    for (const char* number :
         {"weight_decay", "momentum", "dampening", "nesterov", "maximize"}) {
      EXPECT_EQ(numbers.at(number), 0) << name << ' ' << number;
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
}

TEST(RuleTest, UnknownNamesAreRefusedAndTheKnownOnesListed) {
  for (const char* name : {"", "SGD", "adamw", "assign"}) {
    const auto text = refusal(name, {});
    EXPECT_TRUE(has(text, std::string("but got '") + name + "'")) << text;
    EXPECT_TRUE(has(
        text, "'sgd', 'adam', 'adagrad', 'rmsprop', 'lion', 'lamb', but got"))
        << text;
    EXPECT_FALSE(has(text, "'assign',")) << text;
  }
  EXPECT_TRUE(has(refusal("sgd", {{"learning_rate", 1}}), "'learning_rate'"));
}

TEST(RuleTest, NumbersThatMakeNoSenseAreRefused) {
  for (const char* name :
       {"lr",
        "weight_decay",
        "momentum",
        "dampening",
        "beta1",
        "beta2",
        "alpha",
        "eps",
        "lr_decay",
        "initial_accumulator_value"}) {
    for (const double value :
         {double(NAN), double(INFINITY), -double(INFINITY), 3.5e38}) {
      EXPECT_TRUE(
          has(refusal("adam", {{name, value}}),
              std::string("expected a ") + name + " of at least 0"))
          << name << ' ' << value;
    }
    if (std::string(name) != "dampening") {
      EXPECT_TRUE(has(refusal("adam", {{name, -1e-300}}), name));
    }
  }
  EXPECT_EQ(refusal("sgd", {{"dampening", -3}, {"momentum", 0.9}}), "no error");
  EXPECT_TRUE(has(refusal("adam", {{"beta1", 1}}), "less than 1"));
  EXPECT_TRUE(has(refusal("lamb", {{"beta2", 1.5}}), "less than 1"));
  EXPECT_EQ(refusal("rmsprop", {{"alpha", 1}}), "no error");
  EXPECT_EQ(refusal("adam", {{"beta1", 0}, {"beta2", 0}}), "no error");
}

TEST(RuleTest, NesterovNeedsAMomentumWithoutDampening) {
  EXPECT_TRUE(has(refusal("sgd", {{"nesterov", 1}}), "momentum 0"));
  EXPECT_TRUE(has(
      refusal("sgd", {{"nesterov", 1}, {"momentum", 0.9}, {"dampening", 0.25}}),
      "dampening 0.25"));
  EXPECT_EQ(refusal("sgd", {{"nesterov", 1}, {"momentum", 0.9}}), "no error");
}

} // namespace
} // namespace torchkv

#pragma once

#include <array>
#include <cmath>
#include <cstddef>

#include "rule.h"

// What rule.cpp knows about each rule.
namespace torchkv::rule_table {

// A rule's name, its states as torch.optim or MXNet name them, and its
// hyperparameters besides lr, weight_decay and maximize, which all rules have.
struct RuleInfo {
  RuleSpec::Id id;
  const char* name;
  std::array<const char*, kMaxStates> states;
  std::array<const char*, 7> options;
};

// In the order of the ids.
inline constexpr std::array<RuleInfo, 25> kRules{{
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
    {RuleSpec::Id::kMxnetSgd,
     "mxnet_sgd",
     {"mom"},
     {"momentum", "clip_gradient"}},
    {RuleSpec::Id::kMxnetNag,
     "mxnet_nag",
     {"mom"},
     {"momentum", "clip_gradient"}},
    {RuleSpec::Id::kMxnetSignum,
     "mxnet_signum",
     {"mom"},
     {"momentum", "wd_lh", "clip_gradient"}},
    {RuleSpec::Id::kMxnetAdam,
     "mxnet_adam",
     {"mean", "var"},
     {"beta1", "beta2", "epsilon", "clip_gradient"}},
    {RuleSpec::Id::kMxnetAdamax,
     "mxnet_adamax",
     {"mean", "norm"},
     {"beta1", "beta2", "clip_gradient"}},
    {RuleSpec::Id::kMxnetNadam,
     "mxnet_nadam",
     {"mean", "var"},
     {"beta1", "beta2", "epsilon", "schedule_decay", "clip_gradient"}},
    {RuleSpec::Id::kMxnetAdagrad,
     "mxnet_adagrad",
     {"history"},
     {"eps", "clip_gradient"}},
    {RuleSpec::Id::kMxnetAdadelta,
     "mxnet_adadelta",
     {"acc_g", "acc_delta"},
     {"rho", "epsilon", "clip_gradient"}},
    {RuleSpec::Id::kMxnetRmsprop,
     "mxnet_rmsprop",
     {"n", "g", "delta"},
     {"gamma1",
      "gamma2",
      "epsilon",
      "centered",
      "clip_weights",
      "clip_gradient"}},
    {RuleSpec::Id::kMxnetFtrl,
     "mxnet_ftrl",
     {"z", "n"},
     {"lamda1", "beta", "clip_gradient"}},
    {RuleSpec::Id::kMxnetFtml,
     "mxnet_ftml",
     {"d", "v", "z"},
     {"beta1", "beta2", "epsilon", "clip_gradient"}},
    {RuleSpec::Id::kMxnetDcasgd,
     "mxnet_dcasgd",
     {"previous_weight", "mom"},
     {"momentum", "lamda", "clip_gradient"}},
    {RuleSpec::Id::kMxnetTest, "mxnet_test", {}, {"clip_gradient"}},
    {RuleSpec::Id::kMxnetLamb,
     "mxnet_lamb",
     {"mean", "var"},
     {"beta1",
      "beta2",
      "epsilon",
      "lower_bound",
      "upper_bound",
      "bias_correction",
      "clip_gradient"}},
    {RuleSpec::Id::kMxnetLars,
     "mxnet_lars",
     {"mom"},
     {"momentum", "eta", "eps", "momentum_correction", "clip_gradient"}},
    {RuleSpec::Id::kMxnetLbsgd,
     "mxnet_lbsgd",
     {"mom"},
     {"momentum",
      "warmup_strategy",
      "warmup_updates",
      "begin_update",
      "batch_scale",
      "clip_gradient"}},
    {RuleSpec::Id::kMxnetSgld, "mxnet_sgld", {}, {"seed", "clip_gradient"}},
    {RuleSpec::Id::kMxnetGroupAdagrad,
     "mxnet_groupadagrad",
     {"history"},
     {"eps", "clip_gradient"}},
}};

// The hyperparameters in the order of error messages. All must be finite in
// fp32 and less than `less_than`.
struct Number {
  const char* name;
  double RuleSpec::* member;
  double less_than = HUGE_VAL;
};

// Names that no rule has together share a member.
inline constexpr std::array<Number, 29> kNumbers{{
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
    {"clip_gradient", &RuleSpec::clip_gradient},
    {"epsilon", &RuleSpec::eps},
    {"gamma1", &RuleSpec::alpha},
    {"gamma2", &RuleSpec::momentum},
    {"rho", &RuleSpec::alpha},
    {"batch_scale", &RuleSpec::alpha},
    {"begin_update", &RuleSpec::lr_decay},
    {"wd_lh", &RuleSpec::extra1},
    {"schedule_decay", &RuleSpec::extra1},
    {"clip_weights", &RuleSpec::extra1},
    {"lamda1", &RuleSpec::extra1},
    {"lamda", &RuleSpec::extra1},
    {"lower_bound", &RuleSpec::extra1},
    {"eta", &RuleSpec::extra1},
    {"seed", &RuleSpec::extra1},
    {"warmup_strategy", &RuleSpec::extra1}, // the number of a WarmupStrategy
    {"beta", &RuleSpec::extra2},
    {"upper_bound", &RuleSpec::extra2},
    {"warmup_updates", &RuleSpec::extra2},
}};

struct Switch {
  const char* name;
  bool RuleSpec::* member;
};

inline constexpr std::array<Switch, 7> kSwitches{{
    {"nesterov", &RuleSpec::nesterov},
    {"maximize", &RuleSpec::maximize},
    {"amsgrad", &RuleSpec::amsgrad},
    {"centered", &RuleSpec::centered},
    {"decoupled", &RuleSpec::decoupled},
    {"bias_correction", &RuleSpec::correction},
    {"momentum_correction", &RuleSpec::correction},
}};

// A rule with the defaults of torch.optim, of MXNet or, for Lion and LAMB, of
// the papers.
RuleSpec with_defaults(RuleSpec::Id id, bool decoupled);

} // namespace torchkv::rule_table

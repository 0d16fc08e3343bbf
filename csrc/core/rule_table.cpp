#include "rule_table.h"

namespace torchkv::rule_table {
namespace {

// MXNet's defaults. begin_update, a product of two options there, is 0.
void set_mxnet_defaults(RuleSpec& rule) {
  using Id = RuleSpec::Id;
  rule.lr = 1e-2;
  rule.eps = 1e-8;
  switch (rule.id) {
    case Id::kMxnetSignum:
      rule.momentum = 0.9;
      break;
    case Id::kMxnetAdam:
      rule.lr = 1e-3;
      break;
    case Id::kMxnetAdamax:
      rule.lr = 2e-3;
      break;
    case Id::kMxnetNadam:
      rule.lr = 1e-3;
      rule.extra1 = 0.004;
      break;
    case Id::kMxnetAdagrad:
      rule.eps = 1e-7;
      break;
    case Id::kMxnetAdadelta:
      rule.alpha = 0.9;
      rule.eps = 1e-5;
      break;
    case Id::kMxnetRmsprop:
      rule.lr = 1e-3;
      rule.alpha = 0.9;
      rule.momentum = 0.9;
      break;
    case Id::kMxnetFtrl:
      rule.lr = 0.1;
      rule.extra1 = 0.01;
      rule.extra2 = 1;
      break;
    case Id::kMxnetFtml:
      rule.beta1 = 0.6;
      break;
    case Id::kMxnetDcasgd:
      rule.extra1 = 0.04;
      break;
    case Id::kMxnetLamb:
      rule.lr = 1e-3;
      rule.eps = 1e-6;
      rule.correction = true;
      break;
    case Id::kMxnetLars:
      rule.eps = 0;
      rule.extra1 = 0.001;
      rule.extra2 = 1;
      rule.correction = true;
      break;
    case Id::kMxnetLbsgd:
      rule.alpha = 1;
      rule.extra2 = 160;
      break;
    case Id::kMxnetGroupAdagrad:
      rule.eps = 1e-5;
      break;
    default:
      break;
  }
}

} // namespace

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
  if (is_mxnet(rule)) {
    set_mxnet_defaults(rule);
  }
  return rule;
}

} // namespace torchkv::rule_table

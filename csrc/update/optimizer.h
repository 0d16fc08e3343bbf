#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../core/export.h"
#include "../core/key.h"
#include "../core/rule.h"
#include "schedule.h"

namespace torchkv {

// What is done to a summed gradient before the rule sees it, in this order.
struct GradientSpec {
  int64_t accumulate = 1; // pushes of a key that are added up to one step
  double rescale_grad = 1; // a factor
  double clip_value = 0; // limits each element to [-clip_value, clip_value]
  double max_norm = 0; // limits the 2-norm of all gradients of a call; 0 = off
  // A call whose gradients' 2-norm is infinite or NaN makes no step and adds
  // nothing to what is accumulated; what was accumulated for steps that it
  // would have made is dropped.
  bool skip_nonfinite = false;
  // Row-sparse gradients step only their rows, where the rule can; else they
  // are dense ones with zeros.
  bool lazy = true;
};

// Its numbers by name; ValueError for an unknown name.
TORCHKV_API GradientSpec
make_gradient(const char* op, const NumbersByName& numbers);
TORCHKV_API NumbersByName numbers_of(const GradientSpec& gradient);

// Options of one key.
struct KeyOptions {
  size_t group = 0;
  double lr_mult = 1;
  double wd_mult = 1;
};

// A built-in optimizer: a rule, its hyperparameters by group of keys, and the
// handling of gradients. Immutable: changing the learning rate makes a new one
// of the same generation, and calls in flight keep using the old one.
struct TORCHKV_API Optimizer {
  std::vector<RuleSpec> groups; // at least one, of one id
  ska::flat_hash_map<Key, KeyOptions, KeyHash> keys; // others: KeyOptions()
  GradientSpec gradient;
  Schedule schedule{}; // of the learning rate of all groups, if it has a kind
  // Steps of each key are counted from this number, as in MXNet.
  int64_t begin_num_update = 0;
  // State in entries belongs to the optimizer of this generation. Later
  // optimizers have greater generations.
  uint64_t generation = 0;

  // With the learning rate of the group, whatever the schedule.
  RuleSpec rule_of(const Key& key) const;
  // The step of a key that has made `num_steps`, without what is done to its
  // gradient: its rule with the learning rate, its number and its random
  // numbers.
  void set_step(RuleStep& step, const Key& key, int64_t num_steps) const;
  // What MXNet calls num_update, of a key.
  int64_t num_updates(int64_t num_steps) const;
  // "adam"
  const char* name() const {
    return name_of(groups[0]);
  }
  bool is_elementwise() const;
};

// What all groups share, by name: gradient, schedule, and begin_num_update if
// it is not 0. ValueError for an unknown name.
TORCHKV_API void set_shared_numbers(
    const char* op,
    Optimizer& optimizer,
    const NumbersByName& numbers);
TORCHKV_API NumbersByName shared_numbers(const Optimizer& optimizer);

// An optimizer of one group, from its name and its hyperparameters (make_rule)
// and shared numbers by name. ValueError for unknown names and invalid numbers.
TORCHKV_API Optimizer make_optimizer(
    const char* op,
    const std::string& name,
    const NumbersByName& numbers);

using OptimizerPtr = std::shared_ptr<const Optimizer>;

// ValueError if the parts are inconsistent or a number is invalid.
TORCHKV_API void check_optimizer(const char* op, const Optimizer& optimizer);

// Greater than that of every other optimizer or updater of the process.
TORCHKV_API uint64_t new_generation();

} // namespace torchkv

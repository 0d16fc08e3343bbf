#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "../core/export.h"
#include "../core/key.h"
#include "../core/rule.h"

namespace torchkv {

// What is done to a summed gradient before the rule sees it, in this order.
struct GradientSpec {
  int64_t accumulate = 1; // pushes of a key that are added up to one step
  double rescale_grad = 1; // a factor
  double clip_value = 0; // limits each element to [-clip_value, clip_value]
  double max_norm = 0; // limits the 2-norm of all gradients of a call; 0 = not
  // A call whose gradients' 2-norm is infinite or NaN makes no step and adds
  // nothing to what is accumulated; what was accumulated for steps that it
  // would have made is dropped.
  bool skip_nonfinite = false;
};

// Its numbers by name; ValueError for a name that is none.
TORCHKV_API GradientSpec
make_gradient(const char* op, const NumbersByName& numbers);
TORCHKV_API NumbersByName numbers_of(const GradientSpec& gradient);

// What is particular to a key.
struct KeyOptions {
  size_t group = 0;
  double lr_mult = 1;
  double wd_mult = 1;
};

// A built-in optimizer: a rule, its numbers by group of keys, and how gradients
// are handled. Never changed after it was made: a live change of the learning
// rate makes another one with the same identity, and calls under way end with
// the one that they began with.
struct TORCHKV_API Optimizer {
  std::vector<RuleSpec> groups; // at least one, of one id
  ska::flat_hash_map<Key, KeyOptions, KeyHash> keys; // others: KeyOptions()
  GradientSpec gradient;
  // State in entries belongs to the optimizer of this identity, and is none of
  // any other's.
  uint64_t identity = 0;

  RuleSpec rule_of(const Key& key) const;
};

// What an optimizer has made of a key: copies that share nothing with the
// store. The tensors are those of state_names, and "master" and "accumulated"
// where there are such.
struct KeyState {
  int64_t step = 0;
  int64_t num_accumulated = 0;
  std::unordered_map<std::string, at::Tensor> tensors;
};

// An optimizer of one group, from its name and its hyperparameters (make_rule)
// and gradient options (make_gradient) by name. ValueError for unknown names
// and invalid numbers.
TORCHKV_API Optimizer make_optimizer(
    const char* op,
    const std::string& name,
    const NumbersByName& numbers);

using OptimizerPtr = std::shared_ptr<const Optimizer>;

// ValueError where the parts do not fit together or a number makes no sense.
TORCHKV_API void check_optimizer(const char* op, const Optimizer& optimizer);

// A number that no other optimizer of the process has.
TORCHKV_API uint64_t new_identity();

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "../core/rule.h"
#include "../core/value.h"
#include "entry.h"

namespace torchkv {

// What one call does to one key: the values to add up, or the tensors to fill.
// It owns neither and ends with the call. Whoever hands an item to Comm holds
// the mutex of its entry.
struct Item {
  Entry* entry = nullptr;
  c10::ArrayRef<Value> values;
  c10::ArrayRef<at::Tensor> outs;
  const RuleStep* step = nullptr; // null = ASSIGN
};

} // namespace torchkv

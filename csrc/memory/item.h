#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "../core/rule.h"
#include "../core/value.h"
#include "entry.h"

namespace torchkv {

// What one call does to one key: the values to sum, or the tensors to fill.
// Owns neither and is valid during the call. REQUIRES: the entry's mutex.
struct Item {
  Entry* entry = nullptr;
  c10::ArrayRef<Value> values;
  c10::ArrayRef<at::Tensor> outs;
  const RuleStep* step = nullptr; // null = ASSIGN
};

} // namespace torchkv

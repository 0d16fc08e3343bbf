#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <vector>

#include "../core/export.h"
#include "../memory/parts.h"
#include "../memory/slices.h"
#include "../update/optimizer.h"
#include "entries.h"

namespace torchkv {

// The items of the keys [begin, end) of a push.
// REQUIRES: the entries' mutexes, until it is destroyed.
class TORCHKV_API Batch {
 public:
  Batch(
      const Entries& entries,
      const Tensors& values,
      size_t begin,
      size_t end);
  Batch(const Batch&) = delete; // items point into it
  Batch& operator=(const Batch&) = delete;
  Batch(Batch&&) = delete;
  Batch& operator=(Batch&&) = delete;
  ~Batch() = default;

  // Splits the items into those that make a step of the optimizer now and those
  // whose values are accumulated for a later one. A key already updated by a
  // later optimizer makes a step of `current()` instead, which owns its state.
  // Clears the state of earlier optimizers.
  void plan(
      const Optimizer& optimizer,
      c10::function_ref<OptimizerPtr()> current,
      Slices& slices);

  c10::SmallVector<Item, 1> items;
  std::vector<RuleStep> steps; // of all items
  std::vector<Item> stepping;
  std::vector<Item> accumulating;

 private:
  c10::SmallVector<Value, 4> values_;
};

} // namespace torchkv

#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <vector>

#include "../comm/comm.h"
#include "../core/export.h"
#include "../memory/item.h"
#include "../update/optimizer.h"
#include "arguments.h"

namespace torchkv {

// The items of the keys [begin, end) of a push, for Comm. Places their entries
// where that is still to do; `may_cut` as for Comm::place.
// REQUIRES: the entries' mutexes, until it is destroyed.
class TORCHKV_API Batch {
 public:
  Batch(
      Comm& comm,
      const Entries& entries,
      const Tensors& values,
      size_t begin,
      size_t end,
      bool may_cut);
  Batch(const Batch&) = delete; // items point into it
  Batch& operator=(const Batch&) = delete;
  Batch(Batch&&) = delete;
  Batch& operator=(Batch&&) = delete;
  ~Batch() = default;

  // Splits the items into those that make a step of the optimizer now and those
  // whose values are kept for a later one. Where an optimizer that was set
  // after `optimizer` has moved a key already, the step is one of `current()`:
  // the state is its own.
  void plan(
      const Optimizer& optimizer,
      c10::function_ref<OptimizerPtr()> current);

  c10::SmallVector<Item, 1> items;
  std::vector<RuleStep> steps; // of all items
  std::vector<Item> stepping;
  std::vector<Item> accumulating;

 private:
  Comm& comm_;
  c10::SmallVector<Value, 4> values_;
};

} // namespace torchkv

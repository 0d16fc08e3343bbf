#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <utility>
#include <vector>

#include "../core/export.h"
#include "../device/streams.h"
#include "../memory/parts.h"
#include "../memory/placement.h"
#include "../memory/slices.h"
#include "backends.h"
#include "collective.h"

namespace torchkv {

// Sums, steps and copies out values between the devices of one process.
// Independent of keys and locks, and never runs Python; arguments have been
// checked.
//
// Sums run left to right in the accumulation type (at::toOpMathType of the
// promotion of all values and the stored value; fp8 counts as fp32) and are
// rounded once, so the same values give the same bits on every run, however a
// value is sharded; only a norm may differ between shardings.
//
// Thread safety: any thread, REQUIRES the mutex of each item's entry. Work on
// accelerators is enqueued on the calling thread's current streams; when a
// method returns, the tensors of the call may be overwritten or freed on
// theirs.
class TORCHKV_API Reducer {
 public:
  using Items = c10::SmallVector<Item, 4>;

  // Without a collective, the backends move all values.
  Reducer(
      Slices& slices,
      Placement& placement,
      Streams& streams,
      std::unique_ptr<Collective> collective = nullptr)
      : slices_(slices),
        placement_(placement),
        streams_(streams),
        collective_(std::move(collective)) {}

  // Adds up each item's values and applies its rule to the stored value and the
  // state, which it creates if needed; in one pass over the memory of all items
  // (LAMB: three). Items' outs get the new values in that pass on the CPU,
  // where their memory layout is that of the values; returns the others, which
  // are for copy_out(), after what must count the update. REQUIRES: distinct
  // entries, of floating-point or complex dtypes where the rule is not ASSIGN;
  // no out overlaps another tensor of the call, but for values of its own item
  // that have its very memory.
  Items update(c10::ArrayRef<Item> items);

  // Adds the sum of each item's values to what its entry has accumulated.
  // REQUIRES: distinct entries.
  void accumulate(c10::ArrayRef<Item> items);

  // The squared 2-norm of all items' gradients together, as their rules would
  // see them, multiplied by `scale` before they are squared; infinite or NaN
  // where one of them is. The same bits for any number of threads. Changes
  // nothing.
  double squared_norm(c10::ArrayRef<Item> items, double scale);

  // Adds up an item's values into its entry's merge buffer, which has the
  // stored dtype, and calls `update` with it and the stored value. Both are
  // whole: a sharded value is gathered. On an accelerator, their device is the
  // current one. `update` may leave the buffer undefined and replace the stored
  // value by an equal tensor.
  using Update = c10::function_ref<void(at::Tensor& input, at::Tensor& stored)>;
  void reduce(const Item& item, Update update);

  // The same where the sum is not kept: it has `num_rows` rows, which the
  // values' ids count.
  void sum_rows(const Item& item, int64_t num_rows, Update update);

  // Writes each item's stored value into all its outs, in one pass over the
  // memory of all items. REQUIRES: distinct entries.
  void copy_out(c10::ArrayRef<Item> items);

 private:
  struct Call;

  std::vector<RuleStep> prepare(Call& call, std::vector<at::Tensor*>& made);
  void copy_parts(Parts& parts);

  Slices& slices_;
  Placement& placement_;
  Streams& streams_;
  const std::unique_ptr<Collective> collective_;
};

} // namespace torchkv

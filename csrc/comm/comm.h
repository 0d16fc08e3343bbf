#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include "../core/export.h"
#include "../core/rule.h"
#include "../memory/entry.h"
#include "../memory/item.h"
#include "../update/optimizer.h"

namespace torchkv {

// Adds up and hands out values between the devices of one process. It knows no
// keys, takes no locks and meets no Python; arguments have been checked.
//
// Thread safety: any thread, REQUIRES the mutex of each item's entry. Work on
// accelerators is enqueued on the calling thread's current streams; when a
// method returns, the tensors of the call may be overwritten or freed on
// theirs.
class TORCHKV_API Comm {
 public:
  virtual ~Comm() = default;

  // Gives a new entry its slices and their first value, a copy of `value`.
  virtual void store(Entry& entry, const at::Tensor& value) = 0;

  // Takes over an entry that another store's Comm has given its slices.
  virtual void adopt(Entry& entry) = 0;

  // Moves entries whose place is not decided yet to where the values and outs
  // of a call say that they belong. `may_cut`: the updater does not need to see
  // whole values. REQUIRES: distinct entries.
  virtual void place(c10::ArrayRef<Item> items, bool may_cut) = 0;

  // Adds up each item's values and applies its rule to the stored value and the
  // state, which it makes where there is none; in one pass over the memory of
  // all items (LAMB: three). REQUIRES: distinct entries, of floating-point or
  // complex dtypes where the rule is not ASSIGN.
  virtual void reduce_update(c10::ArrayRef<Item> items) = 0;

  // Adds the sum of each item's values to what its entry has accumulated.
  // REQUIRES: distinct entries.
  virtual void accumulate(c10::ArrayRef<Item> items) = 0;

  // The squared 2-norm of all items' gradients together, as their rules would
  // see them, multiplied by `scale` before they are squared; infinite or NaN
  // where one of them is. The same bits for any number of threads. Changes
  // nothing.
  virtual double squared_norm(c10::ArrayRef<Item> items, double scale) = 0;

  // What an optimizer has made of an entry: a copy, from and to it, or nothing.
  // REQUIRES for set_state: tensors of the shape of the value, named as the
  // rule names them.
  virtual KeyState state_of(Entry& entry, const RuleSpec& rule) = 0;
  virtual void set_state(
      Entry& entry,
      const RuleSpec& rule,
      const KeyState& state) = 0;
  virtual void clear_state(Entry& entry) = 0;

  // Adds up an item's values into its entry's merge buffer, which has the
  // stored dtype, and hands it with the stored value to an opaque updater. Both
  // are whole, which ends a cut; on an accelerator, their device is the current
  // one. The buffer may be left undefined, the stored value may be replaced by
  // an equal tensor.
  using Update = c10::function_ref<void(at::Tensor& input, at::Tensor& stored)>;
  virtual void reduce(const Item& item, Update update) = 0;

  // Writes each item's stored value into all its outs, in one pass over the
  // memory of all items. REQUIRES: distinct entries.
  virtual void copy_out(c10::ArrayRef<Item> items) = 0;

  // An uninitialised tensor like the stored value, on its device; of a value
  // that is cut, on the one where it was whole.
  virtual at::Tensor empty_like(const Entry& entry) = 0;
};

} // namespace torchkv

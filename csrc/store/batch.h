#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <deque>
#include <optional>
#include <vector>

#include "../core/compressed.h"
#include "../core/export.h"
#include "../core/row_sparse.h"
#include "../memory/parts.h"
#include "../memory/slices.h"
#include "../update/optimizer.h"
#include "arguments.h"
#include "compression.h"

namespace torchkv {

// Whether an entry is there twice.
bool has_repeats(const Entries& entries);

// The tensors of a call, in a group for each entry. Groups of a repeated entry
// are merged: the entry is there once, where it first appears, and its group
// has the tensors of all its appearances in the order given.
class TORCHKV_API Groups {
 public:
  // Without a compression, values are pushed as they are. `outs` of the same
  // entries, or null, get the new values in the pass that makes them.
  // REQUIRES: entries.size() == tensors.size(); the tensors outlive this; with
  // outs, no entry repeats, and Reducer::update() takes them.
  Groups(
      Entries entries,
      const Tensors& tensors,
      CompressionPtr compression = nullptr,
      const Tensors* outs = nullptr);
  C10_DISABLE_COPY_AND_ASSIGN(Groups);

  const Entries& entries() const {
    return entries_;
  }
  const Tensors& tensors() const {
    return merged_ ? *merged_ : tensors_;
  }
  const StoreCompression* compression() const {
    return compression_.get();
  }
  const Tensors* outs() const {
    return outs_;
  }

 private:
  void merge();

  Entries entries_;
  const Tensors& tensors_;
  const CompressionPtr compression_;
  const Tensors* const outs_;
  std::optional<Tensors> merged_; // if an entry repeats
};

// The items of the keys [begin, end) of a push.
// REQUIRES: the entries' mutexes, until it is destroyed.
class TORCHKV_API Batch {
 public:
  // REQUIRES: the groups outlive this.
  Batch(const Groups& groups, size_t begin, size_t end);
  C10_DISABLE_COPY_AND_ASSIGN(Batch); // items point into it

  // Splits the items into those that make a step of the optimizer now and those
  // whose values are accumulated for a later one. A key already updated by a
  // later optimizer makes a step of `current()` instead, which owns its state.
  // Clears the state of earlier optimizers.
  void plan(
      const Optimizer& optimizer,
      c10::function_ref<OptimizerPtr()> current,
      Slices& slices);

  // Gives the rows that values of row-sparse keys have slots in the stored
  // values, which are made where they are missing: with the first state of
  // plan()'s steps or, without, of `rule`; null: of any.
  void find_rows(const RuleSpec* rule = nullptr);
  // Instead, of the item that is the only one, and whose values are all
  // row-sparse: replaces ids by places among the distinct ones, which it
  // returns in ascending order.
  at::Tensor find_distinct_rows();
  // Whether all values are row-sparse.
  bool has_rows_only() const;
  // After find_rows(): forgets the other rows of these keys.
  void keep_rows();

  // Replaces values by what the groups' compression sends of them, except those
  // of keys with an encoded value; on an accelerator, by its codes if they
  // leave it, else the first ones of a key that are on one device by their sum.
  // Frees stale residuals. REQUIRES: check_compressible, placed items.
  void compress(Slices& slices);
  // After the compressed values of these items have been added up: counts them,
  // and keeps what was not sent.
  void count_compressed(c10::ArrayRef<Item> summed);

  // The tensors of item `i` as they were pushed.
  c10::ArrayRef<at::Tensor> pushed(size_t i) const {
    return groups_.tensors().of(static_cast<int64_t>(begin_ + i));
  }

  c10::SmallVector<Item, 1> items;
  std::vector<RuleStep> steps; // of all items
  std::vector<Item> stepping;
  std::vector<Item> accumulating;

 private:
  c10::ArrayRef<Value> compress_on_devices(
      const Codec& codec,
      Entry& entry,
      Value* begin,
      Value* end,
      Slices& slices);

  const Groups& groups_;
  const size_t begin_;
  const StoreCompression* const compression_;
  c10::SmallVector<Value, 4> values_;
  std::deque<RowSparse> rows_; // by slot
  // What values point to that have been laid out or compressed.
  std::deque<at::Tensor> tensors_;
  std::deque<Compressed> compressed_;
  std::deque<DeviceCodes> codes_;
  // Of values compressed on devices.
  struct PushedResidual {
    const Value* end; // of the item's values
    size_t position;
    at::Tensor residual; // undefined without error feedback
  };
  std::vector<PushedResidual> sent_; // in the order of values_
};

} // namespace torchkv

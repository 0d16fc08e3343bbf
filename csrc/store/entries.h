#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "../core/export.h"
#include "../memory/entry.h"
#include "arguments.h"

namespace torchkv {

// The entries of a call's keys.
using Entries = c10::SmallVector<EntryPtr, 2>;

// The tensors of a call, in a group for each entry. Groups of a repeated entry
// are merged: the entry is there once, where it first appears, and its group
// has the tensors of all its appearances in the order given.
class TORCHKV_API Groups {
 public:
  // REQUIRES: entries.size() == tensors.size(); the tensors outlive this.
  Groups(Entries entries, const Tensors& tensors);
  C10_DISABLE_COPY_AND_ASSIGN(Groups);

  const Entries& entries() const {
    return entries_;
  }
  const Tensors& tensors() const {
    return merged_ ? *merged_ : tensors_;
  }

 private:
  void merge();

  Entries entries_;
  const Tensors& tensors_;
  std::optional<Tensors> merged_; // if an entry repeats
};

} // namespace torchkv

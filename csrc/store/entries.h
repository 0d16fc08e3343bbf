#pragma once

#include <c10/util/SmallVector.h>

#include <optional>

#include "../core/export.h"
#include "../memory/entry.h"
#include "arguments.h"

namespace torchkv {

// The entries of a call's keys.
using Entries = c10::SmallVector<EntryPtr, 2>;

// Merges the groups of a repeated entry: `entries` keeps each entry once, where
// it first appears, and its group holds the tensors of all its appearances in
// the order given. Nothing where no entry repeats.
// REQUIRES: entries.size() == tensors.size()
TORCHKV_API std::optional<Tensors> merge_repeats(
    Entries& entries,
    const Tensors& tensors);

} // namespace torchkv

#pragma once

#include <cstdint>

#include "../core/key.h"
#include "../core/rule.h"
#include "../memory/entry.h"
#include "../memory/key_state.h"

namespace torchkv {

// The checks of an optimizer's state for a key, like those of check.h.

// TypeError unless the dtype of the key's value is floating-point or complex,
// as optimizers require.
void check_optimizable(const char* op, const Entry& entry);

// ValueError unless `count`, named `name`, is a count of updates that can grow.
void check_counter(
    const char* op,
    const Key& key,
    const char* name,
    int64_t count);

// ValueError unless `state` is a valid state of the rule for the entry.
void check_state(
    const char* op,
    const Entry& entry,
    const RuleSpec& rule,
    const KeyState& state);

} // namespace torchkv

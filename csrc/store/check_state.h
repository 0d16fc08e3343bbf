#pragma once

#include <cstdint>

#include "../core/key.h"
#include "../core/rule.h"
#include "../memory/key_state.h"
#include "../memory/meta.h"

namespace torchkv {

// The checks of an optimizer's state for a key, like those of check.h.

// TypeError unless the dtype of the key's value is floating-point or complex,
// as optimizers require.
void check_optimizable(const char* op, const Key& key, const Meta& meta);

// ValueError unless `count`, named `name`, is a count of updates that can grow.
void check_counter(
    const char* op,
    const Key& key,
    const char* name,
    int64_t count);

// ValueError unless `state` is a valid state of the rule for the key.
void check_state(
    const char* op,
    const Key& key,
    const Meta& meta,
    const RuleSpec& rule,
    const KeyState& state);

} // namespace torchkv

#pragma once

#include <cstdint>

#include "../core/key.h"
#include "../core/rule.h"
#include "../memory/key_state.h"
#include "../memory/meta.h"

namespace torchkv {

// The checks of what an optimizer keeps for a key, as those of check.h.

// Whether an optimizer can work on the key's value: TypeError where its dtype
// is neither floating-point nor complex.
void check_optimizable(const char* op, const Key& key, const Meta& meta);

// Whether a count of updates, as `name`, leaves room to count on: ValueError
// where not.
void check_counter(
    const char* op,
    const Key& key,
    const char* name,
    int64_t count);

// Whether `state` is one that the rule has of the key: ValueError where not.
void check_state(
    const char* op,
    const Key& key,
    const Meta& meta,
    const RuleSpec& rule,
    const KeyState& state);

} // namespace torchkv

#pragma once

#include <cstdint>
#include <initializer_list>

#include "export.h"
#include "key.h"

namespace torchkv {

// Where the random numbers of a key begin: number i is mixed_bits(stream + i).
// A function of its arguments on every machine.
TORCHKV_API uint64_t random_stream(
    uint64_t seed,
    const Key& key,
    std::initializer_list<uint64_t> counters);

} // namespace torchkv

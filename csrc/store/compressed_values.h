#pragma once

#include <ATen/core/Tensor.h>

#include "../core/compressed.h"
#include "../memory/entry.h"
#include "../memory/slices.h"
#include "arguments.h"
#include "compression.h"

namespace torchkv {

// For a call whose values are compressed: TypeError for a key of another than a
// floating-point dtype, NotImplementedError for values or stored values that
// are not in CPU memory. REQUIRES: the thread holds no entry's mutex.
void check_compressible(
    const Call& call,
    const Entries& entries,
    const Compression& compression);

// What the codec sends of a key's value at a position in its list; makes the
// residual where there is none yet, of zeros. REQUIRES: the entry's mutex,
// check_compressible; the value has the memory layout of the stored one; called
// for the positions before it.
Compressed compress(
    const Codec& codec,
    Entry& entry,
    size_t position,
    const at::Tensor& value,
    Slices& slices);

// ValueError unless these can be an entry's residuals.
void check_residuals(
    const char* op,
    const Entry& entry,
    at::TensorList residuals);

} // namespace torchkv

#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace torchkv::kernels::cpu {

// Copies `num_bytes` into each of `outs`, reading them once. `stream` bypasses
// the caches, and the caller must call end_stream() after the last write. An
// out may be `source` itself.
void copy_line(
    const char* source,
    c10::ArrayRef<char*> outs,
    int64_t num_bytes,
    bool stream);

} // namespace torchkv::kernels::cpu

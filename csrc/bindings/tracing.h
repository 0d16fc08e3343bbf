#pragma once

#include "../core/export.h"

namespace torchkv {

inline constexpr const char* kScriptInstead =
    "script the module that holds it (torch.jit.script), as the store itself "
    "or as store.script_object";

// Throws RuntimeError while make_fx or torch.export records the calling thread:
// a store's calls are not recorded, so pushes would be lost and pulled values
// become constants.
TORCHKV_API void refuse_graph_capture(const char* op);

// The error itself, for other tracers: `tracer` is PyTorch's name of one, and
// `instead` what to write instead.
[[noreturn]] TORCHKV_API void throw_traced(
    const char* op,
    const char* tracer,
    const char* instead = kScriptInstead);

} // namespace torchkv

#pragma once

#include "../core/export.h"
#include "../device/runtime.h"
#include "../store/arguments.h"

namespace torchkv::dist {

// NotImplementedError if the calling thread captures a graph on a device of the
// call's tensors: a replay would send nothing to other processes.
TORCHKV_API void check_not_capturing(const Call& call, Runtime& runtime);

} // namespace torchkv::dist

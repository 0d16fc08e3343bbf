#pragma once

#include <cstddef>

#include "../../core/export.h"

namespace torchkv::dist {

// Bytes that this process may still use, about: what the system has, and what
// the control groups of the process leave.
TORCHKV_API size_t available_memory();

} // namespace torchkv::dist

#pragma once

#include <cstddef>
#include <string>

#include "../../core/export.h"

namespace torchkv::dist {

// Bytes that this process may still use, about: what the system has, and what
// the control groups of the process leave. `root`: where /proc and /sys are.
TORCHKV_API size_t available_memory(const std::string& root = "");

} // namespace torchkv::dist

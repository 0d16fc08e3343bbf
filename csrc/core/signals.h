#pragma once

#include "export.h"

namespace torchkv {

// Set by the Python binding: throws if a signal, such as Ctrl-C, has arrived
// whose Python handler raises. Called without the GIL.
TORCHKV_API void set_signal_check(void (*check)());

// For a thread that waits long: throws if it should not go on.
void check_signals();

} // namespace torchkv

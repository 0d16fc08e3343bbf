#pragma once

#if __has_include("../built_for_torch.h")
#include "../built_for_torch.h" // of an installation: which torch it is for
#endif

// Marks what other binaries (the Python binding, C++ programs, tests) may link
// against; everything else is built with hidden visibility.
#define TORCHKV_API __attribute__((visibility("default")))

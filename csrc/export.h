#pragma once

// Marks what other binaries (the Python door, C++ programs, tests) may link
// against; everything else is built with hidden visibility.
#define TORCHKV_API __attribute__((visibility("default")))

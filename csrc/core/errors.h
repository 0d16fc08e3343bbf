#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "export.h"
#include "key.h"

namespace torchkv {

// An unknown key: an IndexError in C++ and TorchScript. The Python binding
// raises it as KeyError; this type tells it from an IndexError of an updater.
class TORCHKV_API UnknownKeyError : public c10::IndexError {
  using c10::IndexError::IndexError;
};

// Throws UnknownKeyError: "<op>: expected a key of the store, but got ...".
[[noreturn]] TORCHKV_API void throw_unknown_key(const char* op, const Key& key);

// Throws UnknownKeyError for a key in an optimizer's options. `suggestion` is a
// result of did_you_mean.
[[noreturn]] TORCHKV_API void throw_unknown_option_key(
    const char* op,
    const Key& key,
    const std::string& suggestion);

} // namespace torchkv

// For a broken invariant of torchkv itself. TORCH_INTERNAL_ASSERT would tell
// the user to report the bug to PyTorch.
#define TORCHKV_INTERNAL_ASSERT(cond, ...) \
  TORCH_CHECK(                             \
      cond, "torchkv: internal error (" #cond "), please report it to torchkv. ", ##__VA_ARGS__)

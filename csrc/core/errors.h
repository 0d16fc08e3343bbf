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

// Errors of stores on several machines. The Python package has a class of the
// same name for each.
class TORCHKV_API RemoteError : public c10::Error {
  using c10::Error::Error;
};
class TORCHKV_API WorkerLostError : public RemoteError {
  using RemoteError::RemoteError;
};
class TORCHKV_API ServerLostError : public RemoteError {
  using RemoteError::RemoteError;
};
class TORCHKV_API StoreTimeoutError : public RemoteError {
  using RemoteError::RemoteError;
};

// Throws UnknownKeyError: "<op>: expected a key of the store, but got ...".
[[noreturn]] TORCHKV_API void throw_unknown_key(const char* op, const Key& key);

// Throws UnknownKeyError for a key with options, of an optimizer or
// compression. `suggestion` is a result of did_you_mean.
[[noreturn]] TORCHKV_API void throw_unknown_option_key(
    const char* op,
    const Key& key,
    const std::string& suggestion);

// What an error is about.
struct Where {
  const char* op;
  const Key& key;
};

} // namespace torchkv

// TORCH_CHECK_* with the message "<op>: <what> (key 3)".
#define TORCHKV_CHECK_VALUE(condition, where, ...) \
  TORCHKV_CHECK_(VALUE, condition, where, __VA_ARGS__)
#define TORCHKV_CHECK_TYPE(condition, where, ...) \
  TORCHKV_CHECK_(TYPE, condition, where, __VA_ARGS__)
#define TORCHKV_CHECK_NOT_IMPLEMENTED(condition, where, ...) \
  TORCHKV_CHECK_(NOT_IMPLEMENTED, condition, where, __VA_ARGS__)
#define TORCHKV_CHECK_(KIND, condition, where, ...) \
  TORCH_CHECK_##KIND(                               \
      condition, (where).op, ": ", __VA_ARGS__, ' ', (where).key.context())

// For a broken invariant of torchkv itself. TORCH_INTERNAL_ASSERT would tell
// the user to report the bug to PyTorch.
#define TORCHKV_INTERNAL_ASSERT(cond, ...) \
  TORCH_CHECK(                             \
      cond, "torchkv: internal error (" #cond "), please report it to torchkv. ", ##__VA_ARGS__)

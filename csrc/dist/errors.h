#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

#include "../core/export.h"
#include "protocol/message.h"

namespace torchkv {

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

namespace dist {

// "ValueError: text": the type as Python knows it, and the message.
std::string describe(const std::exception& error);

// Throws what the protocol's error is to a user: of `op`, on this rank, which
// has waited `timeout` seconds if the error is a timeout.
[[noreturn]] TORCHKV_API void throw_error(
    const char* op,
    const Error& error,
    int64_t rank,
    double timeout);

} // namespace dist
} // namespace torchkv

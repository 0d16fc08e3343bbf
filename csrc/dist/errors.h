#pragma once

#include <exception>
#include <string>

#include "../core/errors.h"
#include "protocol/message.h"

namespace torchkv::dist {

// "ValueError: text": the type as Python knows it, and the message.
std::string describe(const std::exception& error);

// Throws what the protocol's error is to a user: of `op`, on this rank, which
// has waited `timeout` seconds if the error is a timeout.
[[noreturn]] TORCHKV_API void throw_error(
    const char* op,
    const Error& error,
    int64_t rank,
    double timeout);

} // namespace torchkv::dist

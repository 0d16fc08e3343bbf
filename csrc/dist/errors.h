#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "../core/errors.h"
#include "protocol/message.h"

namespace torchkv::dist {

// "ValueError: text": the type as Python knows it, and the message.
std::string describe(const std::exception& error);
// Of what a function throws.
std::optional<std::string> error_of(c10::function_ref<void()> function);

// "rank 1" or "ranks 0, 2".
std::string listed_ranks(const std::vector<int32_t>& ranks);

// Throws what the protocol's error is to a user: of `op`, on this rank, which
// has waited `timeout` seconds if the error is a timeout.
[[noreturn]] TORCHKV_API void throw_error(
    const char* op,
    const Error& error,
    int64_t rank,
    double timeout);

} // namespace torchkv::dist

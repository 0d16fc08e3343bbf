#pragma once

#include <string>
#include <vector>

#include "export.h"

namespace torchkv {

// A caller's text for an error message: in quotes, with control characters
// escaped as in Python's repr (a NUL would end the message), and shortened in
// the middle if it has more than 200 characters.
TORCHKV_API std::string quoted(const std::string& text);

// "'a', 'b'"
TORCHKV_API std::string listed(const std::vector<std::string>& names);

// "; did you mean 'x'?" with the candidate nearest to `text`, if one is near
// enough to be a misspelling; else "". In C++ for errors that C++ and
// TorchScript programs see without Python; Python calls it, too.
TORCHKV_API std::string did_you_mean(
    const std::string& text,
    const std::vector<std::string>& candidates);

} // namespace torchkv

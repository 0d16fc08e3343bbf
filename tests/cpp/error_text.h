#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace torchkv::testing {

// The text of the error of one type that the call throws, or a description of
// what it does instead.
template <class Error = c10::ValueError, class Call>
std::string error_text(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

} // namespace torchkv::testing

#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace torchkv::testing {

// The text of the ValueError that the call throws, or a description of what it
// does instead.
template <class Call>
std::string error_text(Call call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  } catch (const c10::Error& error) {
    return std::string("another error: ") + error.what_without_backtrace();
  }
  return "no error";
}

} // namespace torchkv::testing

#include "errors.h"

namespace torchkv {

void throw_unknown_key(const char* op, const Key& key) {
  throw UnknownKeyError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      c10::str(
          op,
          ": expected a key of the store, but got ",
          key,
          ", which was never initialised; call init(",
          key,
          ", ...) first ",
          key.context()));
}

void throw_unknown_option_key(
    const char* op,
    const Key& key,
    const std::string& suggestion) {
  throw UnknownKeyError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      c10::str(
          op,
          ": expected options of keys of the store, but got ",
          key,
          ", which was never initialised",
          suggestion,
          " ",
          key.context()));
}

} // namespace torchkv

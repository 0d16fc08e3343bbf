#include "key.h"

#include <c10/util/StringUtil.h>

#include "text.h"

namespace torchkv {

const char* name(KeyKind kind) {
  return kind == KeyKind::kInt ? "int" : "str";
}

std::ostream& operator<<(std::ostream& out, const Key& key) {
  return key.kind() == KeyKind::kInt ? out << key.id()
                                     : out << quoted(key.text());
}

std::string Key::context() const {
  return c10::str("(key ", *this, ')');
}

} // namespace torchkv

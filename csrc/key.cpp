#include "key.h"

#include <sstream>

namespace torchkv {

const char* name(KeyKind kind) {
  return kind == KeyKind::kInt ? "int" : "str";
}

std::ostream& operator<<(std::ostream& out, const Key& key) {
  if (key.kind() == KeyKind::kInt) {
    return out << key.id();
  }
  return out << '\'' << key.text() << '\'';
}

std::string Key::context() const {
  std::ostringstream out;
  out << "(key " << *this << ')';
  return out.str();
}

} // namespace torchkv

#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <utility>

#include "export.h"
#include "mixed_bits.h"

namespace torchkv {

enum class KeyKind : uint8_t { kInt, kStr };

// "int" or "str", as in error messages.
TORCHKV_API const char* name(KeyKind kind);

// The name of a stored value: a 64-bit int or a str. Immutable.
class TORCHKV_API Key {
 public:
  // Implicit, so that C++ programs can write `store.push(3, x)`.
  Key(int64_t id) : id_(id) {} // NOLINT(google-explicit-constructor)
  Key(int id) : id_(id) {} // NOLINT(google-explicit-constructor)
  Key(std::string text) // NOLINT(google-explicit-constructor)
      : text_(std::move(text)), kind_(KeyKind::kStr) {}
  Key(const char* text) // NOLINT(google-explicit-constructor)
      : text_(text), kind_(KeyKind::kStr) {}

  KeyKind kind() const {
    return kind_;
  }
  // REQUIRES: kind() == kInt.
  int64_t id() const {
    return id_;
  }
  // REQUIRES: kind() == kStr.
  const std::string& text() const {
    return text_;
  }

  // "(key 3)" or "(key 'w')", the end of every error message about a key.
  std::string context() const;

  friend bool operator==(const Key& a, const Key& b) {
    return a.kind_ == b.kind_ && a.id_ == b.id_ && a.text_ == b.text_;
  }

 private:
  int64_t id_ = 0;
  std::string text_;
  KeyKind kind_ = KeyKind::kInt;
};

// 3 or 'w'; strings as by `quoted`.
TORCHKV_API std::ostream& operator<<(std::ostream& out, const Key& key);

// Mixes ids: a table of c10 grows without end where too many of its numbers
// share their first place, as those of one pattern may.
struct KeyHash {
  size_t operator()(const Key& key) const {
    return key.kind() == KeyKind::kInt
        ? mixed_bits(static_cast<uint64_t>(key.id()))
        : std::hash<std::string>()(key.text());
  }
};

} // namespace torchkv

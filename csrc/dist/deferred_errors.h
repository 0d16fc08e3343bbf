#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../core/export.h"
#include "../core/key.h"
#include "../store/arguments.h"
#include "protocol/message.h"

namespace torchkv::dist {

// Errors of calls that nobody waits for, until they are asked for. Each key
// keeps the first, so that they are bounded by the number of keys.
class TORCHKV_API DeferredErrors {
 public:
  // Of a call with these keys; without keys, it is kept if no other is.
  void add(const Error& error, const std::vector<Key>& keys);
  bool empty() const {
    return errors_.empty();
  }
  // The earliest of one of the keys or, without keys, of all. Once.
  std::optional<Error> take(const Keys* keys);

 private:
  std::map<int64_t, Error> errors_; // by number, in the order added
  std::unordered_map<Key, int64_t, KeyHash> numbers_;
  int64_t num_added_ = 0;
};

} // namespace torchkv::dist

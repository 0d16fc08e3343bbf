#include "deferred_errors.h"

#include <iterator>

namespace torchkv::dist {

void DeferredErrors::add(const Error& error, const std::vector<Key>& keys) {
  const int64_t number = num_added_ + 1;
  bool is_kept = keys.empty() && errors_.empty();
  for (const auto& key : keys) {
    is_kept |= numbers_.emplace(key, number).second;
  }
  if (is_kept) {
    errors_.emplace(number, error);
    num_added_ = number;
  }
}

std::optional<Error> DeferredErrors::take(const Keys* keys) {
  auto first = errors_.end();
  if (keys == nullptr) {
    first = errors_.begin();
  } else if (!numbers_.empty()) {
    for (const auto& key : keys->list) {
      const auto number = numbers_.find(key);
      if (number != numbers_.end() &&
          (first == errors_.end() || number->second < first->first)) {
        first = errors_.find(number->second);
      }
    }
  }
  if (first == errors_.end()) {
    return std::nullopt;
  }
  const auto node = errors_.extract(first);
  for (auto it = numbers_.begin(); it != numbers_.end();) {
    it = it->second == node.key() ? numbers_.erase(it) : std::next(it);
  }
  return node.mapped();
}

} // namespace torchkv::dist

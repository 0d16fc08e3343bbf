#include "list_cache.h"

#include <cstring>
#include <utility>

namespace torchkv::dist {

SliceListPtr ListCache::find(const std::byte* encoded, size_t size) const {
  for (const auto& known : known_) {
    if (known.encoded.size() == size &&
        std::memcmp(known.encoded.data(), encoded, size) == 0) {
      return known.list;
    }
  }
  return nullptr;
}

void ListCache::add(const std::byte* encoded, size_t size, SliceListPtr list) {
  if (size > kMaxBytes) {
    return;
  }
  known_.push_back({{encoded, encoded + size}, std::move(list)});
  num_bytes_ += size;
  while (num_bytes_ > kMaxBytes) {
    num_bytes_ -= known_.front().encoded.size();
    known_.pop_front();
  }
}

} // namespace torchkv::dist

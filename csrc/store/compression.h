#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "../core/codec.h"
#include "../core/export.h"
#include "../core/key.h"

namespace torchkv {

// How a store compresses pushed values, by group of keys. Immutable, as an
// Optimizer.
struct TORCHKV_API Compression {
  std::vector<Codec> groups; // at least one
  // Keys of groups other than the first, which all others belong to.
  ska::flat_hash_map<Key, size_t, KeyHash> keys;

  const Codec& codec_of(const Key& key) const;
  bool is_none() const; // of all keys
};

using CompressionPtr = std::shared_ptr<const Compression>;

// ValueError if the parts are inconsistent.
TORCHKV_API void check_compression(
    const char* op,
    const Compression& compression);

} // namespace torchkv

#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "../core/codec.h"
#include "../core/export.h"
#include "../core/key.h"

namespace torchkv {

// How a store compresses pushed values, by group of keys.
struct TORCHKV_API Compression {
  std::vector<Codec> groups; // at least one
  // Keys of groups other than the first, which all others belong to.
  ska::flat_hash_map<Key, size_t, KeyHash> keys;

  const Codec& codec_of(const Key& key) const;
  bool is_none() const; // of all keys
  std::vector<Key> named_keys() const;
};

// A compression that a store has. Immutable, as an Optimizer: calls in flight
// keep using the old one.
class TORCHKV_API StoreCompression {
 public:
  // `before`: the one that it replaces, or null.
  StoreCompression(Compression compression, const StoreCompression* before);

  const Compression& get() const {
    return compression_;
  }
  // Later ones have greater generations.
  uint64_t generation() const {
    return generation_;
  }
  // The generation since which the key's codecs have had error feedback without
  // interruption: residuals of earlier ones are stale.
  uint64_t since(const Key& key) const;

 private:
  Compression compression_;
  uint64_t generation_;
  uint64_t since_; // of keys that are not in since_by_key_
  ska::flat_hash_map<Key, uint64_t, KeyHash> since_by_key_;
};

using CompressionPtr = std::shared_ptr<const StoreCompression>;

// ValueError if the parts are inconsistent, TypeError if the kinds of keys
// differ.
TORCHKV_API void check_compression(
    const char* op,
    const Compression& compression);

} // namespace torchkv

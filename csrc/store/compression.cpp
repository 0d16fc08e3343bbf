#include "compression.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../update/optimizer.h"

namespace torchkv {

const Codec& Compression::codec_of(const Key& key) const {
  const auto it = keys.find(key);
  return groups[it == keys.end() ? 0 : it->second];
}

bool Compression::is_none() const {
  return std::all_of(groups.begin(), groups.end(), [](const Codec& codec) {
    return codec.id == Codec::Id::kNone;
  });
}

std::vector<Key> Compression::named_keys() const {
  std::vector<Key> result;
  for (const auto& [key, group] : keys) {
    result.push_back(key);
  }
  return result;
}

StoreCompression::StoreCompression(
    Compression compression,
    const StoreCompression* before)
    : compression_(std::move(compression)),
      generation_(new_generation()),
      since_(generation_) {
  if (before == nullptr) {
    return;
  }
  const auto since = [&](const Codec& old_codec, uint64_t old_since) {
    return old_codec.has_feedback() ? old_since : generation_;
  };
  since_ = since(before->compression_.groups[0], before->since_);
  const auto add = [&](const Key& key) {
    since_by_key_[key] =
        since(before->compression_.codec_of(key), before->since(key));
  };
  for (const auto& [key, group] : before->compression_.keys) {
    add(key);
  }
  for (const auto& [key, group] : compression_.keys) {
    add(key);
  }
  for (const auto& [key, old_since] : before->since_by_key_) {
    add(key);
  }
}

uint64_t StoreCompression::since(const Key& key) const {
  const auto it = since_by_key_.find(key);
  return it == since_by_key_.end() ? since_ : it->second;
}

void check_compression(const char* op, const Compression& compression) {
  const size_t num_groups = compression.groups.size();
  TORCH_CHECK_VALUE(
      num_groups != 0, op, ": expected at least one compression, but got none");
  for (const auto& [key, group] : compression.keys) {
    const KeyKind expected = compression.keys.begin()->first.kind();
    TORCH_CHECK_TYPE(
        key.kind() == expected,
        op,
        ": expected ",
        name(expected),
        " keys, as others of the call, but got a key of kind ",
        name(key.kind()),
        " ",
        key.context());
    TORCH_CHECK_VALUE(
        group < num_groups,
        op,
        ": expected a group less than ",
        num_groups,
        ", but got ",
        group,
        " ",
        key.context());
  }
}

} // namespace torchkv

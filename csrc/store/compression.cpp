#include "compression.h"

#include <c10/util/Exception.h>

#include <algorithm>

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

void check_compression(const char* op, const Compression& compression) {
  const size_t num_groups = compression.groups.size();
  TORCH_CHECK_VALUE(
      num_groups != 0, op, ": expected at least one compression, but got none");
  for (const auto& [key, group] : compression.keys) {
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

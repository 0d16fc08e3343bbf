#include "random_stream.h"

#include "checksum.h"
#include "mixed_bits.h"

namespace torchkv {

uint64_t random_stream(
    uint64_t seed,
    const Key& key,
    std::initializer_list<uint64_t> counters) {
  uint64_t result = mixed_bits(seed);
  result = mixed_bits(
      result ^
      (key.kind() == KeyKind::kInt
           ? static_cast<uint64_t>(key.id())
           : crc32(key.text().data(), key.text().size())));
  for (const uint64_t counter : counters) {
    result = mixed_bits(result ^ counter);
  }
  return result;
}

} // namespace torchkv

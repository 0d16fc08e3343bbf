#include "random_stream.h"

#include "mixed_bits.h"

namespace torchkv {

uint64_t random_stream(
    uint64_t seed,
    const Key& key,
    std::initializer_list<uint64_t> counters) {
  uint64_t result = mixed_bits(seed);
  if (key.kind() == KeyKind::kInt) {
    result = mixed_bits(result ^ static_cast<uint64_t>(key.id()));
  } else {
    for (const char c : key.text()) {
      result = mixed_bits(result ^ static_cast<uint8_t>(c));
    }
    result = mixed_bits(result ^ ~uint64_t{key.text().size()});
  }
  for (const uint64_t counter : counters) {
    result = mixed_bits(result ^ counter);
  }
  return result;
}

} // namespace torchkv

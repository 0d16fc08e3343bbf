#include "checksum.h"

// Defines its functions: to be included here only.
#include <caffe2/serialize/crc_alt.h>

namespace torchkv {

uint32_t crc32(const void* data, size_t size, uint32_t crc) {
  return crc32_fast(data, size, crc);
}

} // namespace torchkv

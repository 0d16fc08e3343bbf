#pragma once

#include <cstddef>
#include <cstdint>

namespace torchkv {

// The CRC-32 (that of zlib and PNG) of `data` after bytes whose CRC is `crc`.
uint32_t crc32(const void* data, size_t size, uint32_t crc = 0);

} // namespace torchkv

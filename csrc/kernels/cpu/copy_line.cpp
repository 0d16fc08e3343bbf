#include "copy_line.h"

#include <algorithm>
#include <cstring>

#include "cache_line.h"

namespace torchkv::kernels::cpu {
namespace {

void stream_copy(const char* source, char* destination, int64_t num_bytes) {
  const int64_t head = std::min(bytes_to_alignment(destination), num_bytes);
  std::memmove(destination, source, head);
  int64_t i = head;
  for (; i + kCacheLine <= num_bytes; i += kCacheLine) {
    TORCHKV_STREAM_LINE(destination + i, source + i);
  }
  std::memmove(destination + i, source + i, num_bytes - i);
}

} // namespace

void copy_line(
    const char* source,
    c10::ArrayRef<char*> outs,
    int64_t num_bytes,
    bool stream) {
  // In blocks that fit into L1, so that the source is read from memory once.
  constexpr int64_t kPiece = 2048;
  const int64_t step = outs.size() == 1 ? num_bytes : kPiece;
  for (int64_t i = 0; i < num_bytes; i += step) {
    const int64_t size = std::min(step, num_bytes - i);
    for (char* out : outs) {
      if (stream) {
        stream_copy(source + i, out + i, size);
      } else {
        std::memmove(out + i, source + i, size);
      }
    }
  }
}

} // namespace torchkv::kernels::cpu

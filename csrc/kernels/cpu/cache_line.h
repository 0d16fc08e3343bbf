#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchkv::kernels::cpu {

// Cache lines: where they begin, reading ahead, and writing past the caches.

constexpr int64_t kCacheLine = 64;

inline int64_t bytes_to_alignment(const char* address) {
  const auto past = reinterpret_cast<uintptr_t>(address) % kCacheLine;
  return past == 0 ? 0 : kCacheLine - static_cast<int64_t>(past);
}

// Asks for what a loop will read some steps from now. Conversions between the
// loads leave the processor too few of them to look ahead at by itself.
inline __attribute__((always_inline)) void prefetch(
    const char* data,
    int64_t num_bytes) {
  constexpr int64_t kAhead = 1024;
  for (int64_t line = 0; line < num_bytes; line += kCacheLine) {
    __builtin_prefetch(data + kAhead + line);
  }
}

// Writes one line past the caches; the destination is aligned to 16 bytes.
#if defined(__x86_64__)
// A macro, because vector arguments pass differently in each clone.
#define TORCHKV_STREAM_LINE(destination, source)                 \
  do {                                                           \
    auto* to = reinterpret_cast<__m128i*>(destination);          \
    const auto* from = reinterpret_cast<const __m128i*>(source); \
    _mm_stream_si128(to, _mm_loadu_si128(from));                 \
    _mm_stream_si128(to + 1, _mm_loadu_si128(from + 1));         \
    _mm_stream_si128(to + 2, _mm_loadu_si128(from + 2));         \
    _mm_stream_si128(to + 3, _mm_loadu_si128(from + 3));         \
  } while (false)
#else
#define TORCHKV_STREAM_LINE(destination, source) \
  std::memcpy(destination, source, kCacheLine)
#endif

// Orders streamed writes of this thread before whatever it does next.
inline void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

} // namespace torchkv::kernels::cpu

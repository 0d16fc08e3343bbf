#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchkv::kernels::cpu {

// Cache lines: alignment, prefetching and non-temporal stores.

// For functions that only prefetch. gcc drops calls to them, as to functions
// without any effect, unless they are inlined first.
#define TORCHKV_PREFETCHES inline __attribute__((always_inline))

constexpr int64_t kCacheLine = 64;

inline int64_t bytes_to_alignment(const char* address) {
  const auto past = reinterpret_cast<uintptr_t>(address) % kCacheLine;
  return past == 0 ? 0 : kCacheLine - static_cast<int64_t>(past);
}

// Prefetches what a loop reads some iterations later. With conversions between
// the loads, too few of them are in flight for the hardware's own prefetching.
TORCHKV_PREFETCHES void prefetch(const char* data, int64_t num_bytes) {
  constexpr int64_t kAhead = 1024;
  for (int64_t line = 0; line < num_bytes; line += kCacheLine) {
    __builtin_prefetch(data + kAhead + line);
  }
}

// Prefetches the beginning of a row at an address that the hardware cannot
// guess; it fetches the rest.
template <bool kIsWritten = false>
TORCHKV_PREFETCHES void prefetch_row(const char* row, int64_t num_bytes) {
  constexpr int64_t kMost = 8 * kCacheLine;
  for (int64_t i = 0; i < (num_bytes < kMost ? num_bytes : kMost);
       i += kCacheLine) {
    __builtin_prefetch(row + i, kIsWritten ? 1 : 0);
  }
}

// Writes one line bypassing the caches. REQUIRES: a destination aligned to 16
// bytes.
#if defined(__x86_64__)
// A macro, because the ABI of vector arguments differs between clones.
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

// Orders the streamed writes of this thread before its later writes.
inline void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

} // namespace torchkv::kernels::cpu

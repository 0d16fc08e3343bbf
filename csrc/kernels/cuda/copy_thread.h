#pragma once

#include <cstdint>

#include "params.h"
#include "types.h"

// Copies, compiled for GPUs and for the host like sum_thread.h.
namespace torchkv::kernels::cuda {

// The words [begin, end) of a key, counted from the first aligned one.
template <typename Word>
TORCHKV_HOST_DEVICE inline void copy_words(
    const KeyHead& key,
    int num_outs,
    int64_t begin,
    int64_t end,
    uint32_t thread) {
  constexpr int kUnroll = 4; // words of one thread in flight
  const auto* source = reinterpret_cast<const Word*>(
      static_cast<const char*>(key.memory) + key.head);
  void* const* outs = pointers_of(key);
  TORCHKV_NO_UNROLL
  for (int64_t first = begin + thread; first < end;
       first += int64_t{kThreads} * kUnroll) {
    Word words[kUnroll];
    TORCHKV_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads < end) {
        words[u] = source[first + u * kThreads];
      }
    }
    for (int k = 0; k < num_outs; ++k) {
      auto* out =
          reinterpret_cast<Word*>(static_cast<char*>(outs[k]) + key.head);
      TORCHKV_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads < end) {
          out[first + u * kThreads] = words[u];
        }
      }
    }
  }
}

// The work of one thread on a chunk.
TORCHKV_HOST_DEVICE inline void copy_thread(
    const ParamsHead& head,
    const char* bank,
    uint32_t chunk,
    uint32_t thread) {
  uint32_t first_chunk = 0;
  const KeyHead& key = find_key(head, bank, chunk, first_chunk);
  const int64_t body = (key.size - key.head) / key.alignment * key.alignment;
  const int64_t begin = int64_t{chunk - first_chunk} * head.chunk;
  const int64_t end = body - begin < head.chunk ? body : begin + head.chunk;
  const auto copy = [&](auto word) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(word));
    copy_words<decltype(word)>(
        key, head.num_values, begin / kSize, end / kSize, thread);
  };
  switch (key.alignment) {
    case 16:
      copy(Pack<uint64_t, 2>());
      break;
    case 8:
      copy(uint64_t());
      break;
    case 4:
      copy(uint32_t());
      break;
    case 2:
      copy(uint16_t());
      break;
    default:
      copy(uint8_t());
  }
  if (begin == 0) {
    // The bytes before and after the aligned words: fewer than 16 each.
    const int64_t tail = key.size - key.head - body;
    if (thread < key.head + tail) {
      const int64_t i = thread < key.head ? thread : body + thread;
      const char byte = static_cast<const char*>(key.memory)[i];
      for (int k = 0; k < head.num_values; ++k) {
        static_cast<char*>(pointers_of(key)[k])[i] = byte;
      }
    }
  }
}

} // namespace torchkv::kernels::cuda

#pragma once

#include <cstdint>

#include "code_chunk.h"
#include "dtypes.h"
#include "params.h"
#include "types.h"

// Sums of codes that kernels have sent, and of dense values between them: the
// code of one thread of one block, compiled for GPUs by receive.cu, and for the
// host by the tests.
namespace torchkv::kernels::cuda {

inline uint32_t num_receive_blocks(const Receive& call) {
  return static_cast<uint32_t>(
      (call.first + call.num_elements + kSendChunk - 1) / kSendChunk);
}

// T is the arithmetic's type.
template <typename T, Codec::Id kCodec>
TORCHKV_HOST_DEVICE inline void receive_thread(
    const Receive& call,
    uint32_t block,
    uint32_t thread) {
  using Chunk = CodeChunk<T, kCodec>;
  const SendRange range(
      int64_t{block} * kSendChunk + int64_t{thread} * kSendPack - call.first,
      call.num_elements,
      call.is_aligned);
  const auto threshold = static_cast<T>(call.threshold);
  T* const sum = static_cast<T*>(call.sum);
  Pack<T, kSendPack> total;
  if (call.adds) {
    range.template load<true>(static_cast<const T*>(sum), total);
  }
  TORCHKV_NO_UNROLL
  for (uint32_t k = 0; k < call.num_values; ++k) {
    const ReceivedValue& value = call.values[k];
    Pack<T, kSendPack> numbers;
    if (value.is_dense) {
      range.template load<true>(static_cast<const T*>(value.memory), numbers);
    } else {
      const auto word = Chunk::words(value.memory, block)[thread];
      T scale = 0;
      if constexpr (Chunk::kBlock != 0) {
        const uint32_t index = thread * kSendPack / Chunk::kBlock;
        scale = Chunk::scales(value.memory, block)[index];
      }
      TORCHKV_UNROLL
      for (int i = 0; i < kSendPack; ++i) {
        constexpr uint32_t kMask = (uint32_t{1} << Chunk::kBits) - 1;
        const auto code =
            static_cast<uint32_t>(word >> (i * Chunk::kBits)) & kMask;
        numbers.at[i] = Chunk::number_of(code, scale, threshold);
      }
    }
    const bool is_first = k == 0 && !call.adds;
    TORCHKV_UNROLL
    for (int i = 0; i < kSendPack; ++i) {
      total.at[i] = is_first ? numbers.at[i] : total.at[i] + numbers.at[i];
    }
  }
  range.template store<false>(total, sum);
}

template <typename T, Codec::Id kCodec>
struct ReceiveTag {
  using number_t = T;
  static constexpr Codec::Id kId = kCodec;
};

// Calls `f` with the ReceiveTag for the numbers and the codec, and returns
// whether there is one.
template <typename F>
bool dispatch_receive(const Receive& call, F f) {
  bool is_known = false;
  dispatch_dtype(call.number, [&](auto number) {
    using T = decltype(number);
    if constexpr (std::is_floating_point_v<T>) {
      is_known = dispatch_codec(call.codec, [&](auto codec) {
        f(ReceiveTag<T, decltype(codec)::value>());
      });
    }
  });
  return is_known;
}

} // namespace torchkv::kernels::cuda

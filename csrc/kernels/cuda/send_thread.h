#pragma once

#include <cstdint>

#include "../../core/mixed_bits.h"
#include "../codecs.h"
#include "code_chunk.h"
#include "dtypes.h"
#include "params.h"
#include "types.h"

// What codecs send, added up or as codes: the code of one thread of one block,
// compiled for GPUs by send.cu, and for the host by the tests.
namespace torchkv::kernels::cuda {

// The threads that find the scale of their elements together; 0 for a codec
// without scales. A block has a whole number of the codec's blocks.
constexpr uint32_t threads_of_scale(Codec::Id codec) {
  return static_cast<uint32_t>(Codec{codec}.block_size()) / kSendPack;
}
static_assert(kThreads % threads_of_scale(Codec::Id::kFp8) == 0);
static_assert(kThreads % threads_of_scale(Codec::Id::kInt4) == 0);

// The threads of a block begin(), and for each value they load(); with a codec
// that has scales, they share what largest() returns, and scale by the maximum;
// then they add() it, or store its codes. In the end they finish(): the sum is
// stored.
template <typename V, Codec::Id kCodec, bool kPacks>
class SendThread {
 public:
  using value_t = V;
  using number_t = arithmetic_t<V>;
  static constexpr Codec::Id kId = kCodec;
  static constexpr bool kPacksCodes = kPacks;
  static constexpr uint32_t kThreadsOfScale = threads_of_scale(kCodec);

  TORCHKV_HOST_DEVICE SendThread(uint32_t block, uint32_t thread)
      : first_(int64_t{block} * kSendChunk + int64_t{thread} * kSendPack) {}

  TORCHKV_HOST_DEVICE inline void begin(const Send& send) {
    if (!kPacks && send.adds) {
      range(send).template load<true>(
          static_cast<const number_t*>(send.sum), total_);
    }
  }

  TORCHKV_HOST_DEVICE inline void load(const Send& send, uint32_t k) {
    const SentValue& value = send.values[k];
    range(send).template load_sum<true, V>(
        value.values, kHasResidual ? value.residual : nullptr, values_);
  }

  // The greatest finite magnitude of its elements.
  TORCHKV_HOST_DEVICE inline number_t largest() const {
    number_t result = 0;
    TORCHKV_UNROLL
    for (int i = 0; i < kSendPack; ++i) {
      const number_t value = values_.at[i];
      const auto magnitude =
          codecs::from_bits<number_t>(codecs::magnitude_bits(value));
      const bool is_larger = codecs::is_finite(value) & (magnitude > result);
      result = codecs::either(is_larger, magnitude, result);
    }
    return result;
  }
  TORCHKV_HOST_DEVICE inline void scale_by(number_t largest) {
    scale_ = codecs::scale_of(
        largest,
        kCodec == Codec::Id::kFp8 ? codecs::kFp8Max : codecs::kInt4Max);
  }

  TORCHKV_HOST_DEVICE inline void add(const Send& send, uint32_t k) {
    [[maybe_unused]] const bool is_first = k == 0 && !send.adds;
    uint32_t bits = 0; // of the random numbers
    if constexpr (kCodec == Codec::Id::kInt4) {
      constexpr auto kBlock = int64_t{kThreadsOfScale} * kSendPack;
      const auto block = static_cast<uint64_t>(first_ / kBlock);
      bits = static_cast<uint32_t>(mixed_bits(send.values[k].stream + block)) +
          static_cast<uint32_t>(first_ % kBlock);
    }
    Pack<number_t, kSendPack> kept;
    [[maybe_unused]] word_t word = 0;
    TORCHKV_UNROLL
    for (int i = 0; i < kSendPack; ++i) {
      const number_t value = values_.at[i];
      const number_t sent = sent_of(send, k, i, bits);
      kept.at[i] = kIsMxnet ? value - sent : codecs::residual_of(value, sent);
      if constexpr (kPacks) {
        const word_t code = Chunk::code_of(sent, scale_.inverse);
        word = static_cast<word_t>(word | (code << (i * Chunk::kBits)));
      } else {
        total_.at[i] = is_first ? sent : total_.at[i] + sent;
      }
    }
    if constexpr (kHasResidual) {
      range(send).template store<true>(
          kept, static_cast<number_t*>(send.values[k].kept));
    }
    if constexpr (kPacks) {
      store_codes(send.values[k].codes, word);
    }
  }

  TORCHKV_HOST_DEVICE inline void finish(const Send& send) const {
    if constexpr (!kPacks) {
      range(send).template store<false>(
          total_, static_cast<number_t*>(send.sum));
    }
  }

 private:
  static constexpr bool kHasResidual = Codec{kCodec}.has_feedback();
  static constexpr bool kIsMxnet =
      kCodec == Codec::Id::k1Bit || kCodec == Codec::Id::k2Bit;
  using Chunk = CodeChunk<number_t, kCodec>;
  using word_t = typename Chunk::word_t;

  TORCHKV_HOST_DEVICE inline SendRange range(const Send& send) const {
    return {first_, send.num_elements, send.is_aligned};
  }

  TORCHKV_HOST_DEVICE inline void store_codes(void* codes, word_t word) const {
    const int64_t chunk = first_ / kSendChunk;
    const auto thread = static_cast<uint32_t>(first_ % kSendChunk) / kSendPack;
    Chunk::words(codes, chunk)[thread] = word;
    if constexpr (kThreadsOfScale != 0) {
      if (thread % kThreadsOfScale == 0) {
        Chunk::scales(codes, chunk)[thread / kThreadsOfScale] = scale_.scale;
      }
    }
  }

  // Of element `i` of value `k`; `random`: the bits for the first element.
  TORCHKV_HOST_DEVICE inline number_t sent_of(
      const Send& send,
      uint32_t k,
      int i,
      uint32_t random) const {
    const number_t value = values_.at[i];
    const auto threshold = static_cast<number_t>(send.threshold);
    if constexpr (kCodec == Codec::Id::k1Bit) {
      return codecs::sent_1bit(value, threshold);
    } else if constexpr (kCodec == Codec::Id::k2Bit) {
      return codecs::sent_2bit(value, threshold);
    } else if constexpr (kCodec == Codec::Id::kFp16) {
      return codecs::sent_fp16(value);
    } else if constexpr (kCodec == Codec::Id::kBf16) {
      return codecs::sent_bf16(value);
    } else if constexpr (kCodec == Codec::Id::kFp8) {
      return codecs::sent_fp8(value, scale_);
    } else if constexpr (kCodec == Codec::Id::kTopK) {
      const TopState& top = *send.values[k].top;
      return codecs::sent_topk(
          value,
          static_cast<codecs::bits_t<number_t>>(top.least_bits),
          first_ + i,
          top.ties_end);
    } else {
      random += static_cast<uint32_t>(i);
      return codecs::sent_int4(value, scale_, codecs::random_from_8(random));
    }
  }

  int64_t first_; // of its elements
  Pack<number_t, kSendPack> values_; // with the residuals
  Pack<number_t, kSendPack> total_;
  codecs::Scale<number_t> scale_{}; // of a codec with scales
};

// One step of a maximum over `kGroup` threads, whose result is that of the
// first one: with half = kGroup / 2, kGroup / 4, ..., 1, and a barrier before
// each.
template <uint32_t kGroup, typename T>
TORCHKV_HOST_DEVICE inline void keep_larger(
    T* shares,
    uint32_t thread,
    uint32_t half) {
  if (thread % kGroup < half && shares[thread] < shares[thread + half]) {
    shares[thread] = shares[thread + half];
  }
}

template <class Thread>
struct SendTag {
  using type = Thread;
};

// Calls `f` with the SendTag of the SendThread for the dtype, the codec and
// whether it packs, and returns whether there is one.
template <typename F>
bool dispatch_send(const Send& send, F f) {
  bool is_known = false;
  dispatch_dtype(send.value, [&](auto value) {
    using V = decltype(value);
    if constexpr (is_floating(dtype_of<V>())) {
      if (send.codec == Codec::Id::kTopK && !send.packs) {
        is_known = true;
        f(SendTag<SendThread<V, Codec::Id::kTopK, false>>());
        return;
      }
      is_known = dispatch_codec(send.codec, [&](auto codec) {
        constexpr auto kCodec = decltype(codec)::value;
        if (send.packs) {
          f(SendTag<SendThread<V, kCodec, true>>());
        } else {
          f(SendTag<SendThread<V, kCodec, false>>());
        }
      });
    }
  });
  return is_known;
}

} // namespace torchkv::kernels::cuda

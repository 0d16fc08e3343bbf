#pragma once

#include <cstdint>
#include <string>

#include "export.h"
#include "rule.h"

namespace torchkv {

// A scheme of gradient compression: what of a pushed value is sent. Schemes
// with error feedback add what was not sent, the residual, to the next value.
struct Codec {
  enum class Id : uint8_t {
    kNone,
    k1Bit,
    k2Bit,
    kFp16,
    kBf16,
    kFp8,
    kInt4,
    kTopK
  };

  Id id = Id::kNone;
  double threshold = 0.5; // of 1bit and 2bit
  int64_t k = 0; // of topk: how many elements; 0: `ratio` of them, at least one
  double ratio = 0.01;
  int64_t seed = 0; // of int4's random numbers

  constexpr bool has_feedback() const {
    return id != Id::kNone && id != Id::kInt4;
  }
  // Elements with one scale; 0 where there is none.
  constexpr int64_t block_size() const {
    return id == Id::kFp8 ? 1024 : id == Id::kInt4 ? 128 : 0;
  }
  // Of a value of so many elements, those that topk sends.
  TORCHKV_API int64_t num_sent(int64_t num_elements) const;
};

// The codec with this name ("none", "1bit", "2bit", "fp16", "bf16", "fp8",
// "int4" or "topk") and these options; others have their defaults. ValueError
// for an unknown name or option, or an invalid number.
TORCHKV_API Codec make_codec(
    const char* op,
    const std::string& name,
    const NumbersByName& numbers);
TORCHKV_API NumbersByName numbers_of(const Codec& codec);
TORCHKV_API const char* name_of(const Codec& codec);

} // namespace torchkv

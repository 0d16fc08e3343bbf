#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "codec.h"
#include "value.h"

namespace torchkv {

constexpr const char* kCompressed = "compressed";

// What a codec sends of a value, whose elements are the payload: a dense tensor
// in CPU memory with the memory layout of the stored value. Adding it up leaves
// what was not sent in the residual.
struct Compressed final : Encoding {
  Compressed() {
    form = kCompressed;
  }

  Codec codec;
  // Of Encoding::dtype and the payload's layout; undefined for a codec without
  // error feedback.
  at::Tensor residual;
  uint64_t stream = 0; // of int4's random numbers
  // Of fp8 and int4, if parts of the value are added up by themselves: the
  // greatest finite magnitude of each block of the whole value, of
  // Encoding::dtype.
  at::Tensor largest;
  // topk sends the elements whose magnitude has more than `least_bits` as an
  // unsigned integer and, of those that have as many, those before `ties_end`.
  uint64_t least_bits = 0;
  int64_t ties_end = 0;
};

// What a codec has sent of a value on a CUDA device: the payload is the codes
// of all its elements (kernels/cuda/code_chunk.h), as bytes.
struct DeviceCodes final : Encoding {
  DeviceCodes() {
    form = kCompressed;
  }

  Codec codec;
};

// What a codec has sent of a value, in CPU memory: the payload is the packed
// codes of all its elements (kernels/cpu/packed_codes.h), as bytes.
struct Packed final : Encoding {
  Packed() {
    form = kCompressed;
  }
};

} // namespace torchkv
